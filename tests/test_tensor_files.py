"""Files of tensors: what is read, what is refused and in which words, and that no save leaves half a file."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import resource
import signal
import stat
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from zoo.tensor_files import check_suffix, file_kind, open_wrapper, read_metadata, read_tensors, write_tensors

SUFFIXES = ("pth", "pt", "safetensors")
KINDS = ("pth", "safetensors")


def _tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1.5, float("nan")])}


def _assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        torch.testing.assert_close(got[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("suffix", [*SUFFIXES, "PTH", "SafeTensors"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ключ 鍵.{suffix}"
    assert write_tensors(str(path), _tensors()) == path
    _assert_equal(read_tensors(path), _tensors())


@pytest.mark.parametrize("name", ["model.bin", "model", "model.pth.gz", "safetensors"])
def test_no_other_suffix_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"got the suffix .* expected \.safetensors, \.pth, \.pt"):
        write_tensors(tmp_path / name, _tensors())
    assert not list(tmp_path.iterdir())


def test_check_suffix_tells_the_kind() -> None:
    assert [check_suffix(f"a.{suffix}") for suffix in SUFFIXES] == ["torch", "torch", "safetensors"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_dtype_survives(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    write_tensors(tmp_path / f"a.{kind}", {"t": tensor})
    got = read_tensors(tmp_path / f"a.{kind}")["t"]
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_that_safetensors_cannot_hold_is_a_value_error(tmp_path: Path) -> None:
    tensors = {"t": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(ValueError, match=r"a\.safetensors: safetensors cannot hold .*complex128; save as \.pth"):
        write_tensors(tmp_path / "a.safetensors", tensors)
    assert not list(tmp_path.iterdir())
    _assert_equal(read_tensors(write_tensors(tmp_path / "a.pth", tensors)), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_in_memory(tmp_path: Path, kind: str) -> None:
    base = torch.randn(4, 6)
    tensors = {
        "transposed": base.t(),
        "column": base[:, 2],
        "expanded": torch.tensor([3.0]).expand(5),
        "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "empty_too": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    assert tensors["negated"].is_neg() and tensors["conjugated"].is_conj()
    _assert_equal(read_tensors(write_tensors(tmp_path / f"a.{kind}", tensors)), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_comes_back_exactly(tmp_path: Path, kind: str) -> None:
    base = torch.arange(8.0)
    turned = torch.tensor([1 + 2j, 3 - 1j])
    tensors = {
        "turned": turned,
        "turned back": turned.conj(),
        "one": base,
        "same": base,
        "half": base[:4],
        "other half": base[4:],
        "reversed": base.reshape(2, 4).t(),
    }
    _assert_equal(read_tensors(write_tensors(tmp_path / f"a.{kind}", tensors)), tensors)


def test_a_torch_file_keeps_ties_and_no_more_than_the_tensors(tmp_path: Path) -> None:
    base = torch.randn(100_000)
    part = base[:10]
    path = write_tensors(tmp_path / "a.pth", {"part": part, "tied": part})
    assert path.stat().st_size < 10_000
    content = torch.load(path, weights_only=True)
    assert content["part"].data_ptr() == content["tied"].data_ptr()


def test_a_torch_file_is_a_plain_state_dict_with_versions(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.pth", _tensors(), versions={"": {"version": 2}})
    content = torch.load(path, weights_only=True)
    assert type(content) is OrderedDict and list(content) == ["weight", "bias"]
    assert content._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_content_makes_equal_files(tmp_path: Path, kind: str) -> None:
    metadata = {f"clé {n}\n": f'"{n}"' for n in range(9)} if kind == "safetensors" else None
    digests = set()
    for n in range(4):
        path = write_tensors(tmp_path / f"{n}.{kind}", _tensors(), metadata=metadata)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        if metadata:
            assert read_metadata(path) == metadata
            _assert_equal(load_file(path), _tensors())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (nn.LazyLinear(2).weight, "lazy"),
        ("text", "is str, expected a tensor"),
    ],
    ids=["meta", "sparse", "lazy", "text"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_plain_values_is_not_saved(tmp_path: Path, kind: str, tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.{kind}: odd .*{reason}"):
        write_tensors(tmp_path / f"a.{kind}", {"fine": torch.ones(1), "odd": tensor})
    assert not list(tmp_path.iterdir())


def test_a_tensor_subclass_is_not_saved(tmp_path: Path) -> None:
    class Sharded(torch.Tensor):
        pass

    with pytest.raises(ValueError, match="t is a Sharded, expected a plain tensor"):
        write_tensors(tmp_path / "a.pth", {"t": torch.ones(2).as_subclass(Sharded)})


# Reading what is none


def _bad_files(raw: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "one byte": raw[:1],
        "header only": raw[:40],
        "third": raw[: len(raw) // 3],
        "end missing": raw[:-200],
        "html": b"<html>404 not found</html>",
        "html, indented": b"\n  <!DOCTYPE html><title>x</title>",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "text": b"hello, world, this is no checkpoint",
        "pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94.",
        "zeros": bytes(4096),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(_bad_files(b"")))
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, kind: str, name: str) -> None:
    good = write_tensors(tmp_path / f"good.{kind}", {"weight": torch.randn(64, 64)})
    bad = tmp_path / f"bad.{kind}"
    bad.write_bytes(_bad_files(good.read_bytes())[name])
    with pytest.raises(ValueError, match=rf"bad\.{kind}: "):
        read_tensors(bad)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "the file is empty; copy or download it again"),
        ("html", "is a web page, not a checkpoint; the download failed"),
        ("html, indented", "is a web page"),
        ("lfs", "run `git lfs pull`"),
        ("text", "neither safetensors nor torch.save wrote this file"),
    ],
)
def test_the_reason_is_said(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "bad.pth").write_bytes(_bad_files(b"")[name])
    with pytest.raises(ValueError, match=words):
        file_kind(tmp_path / "bad.pth")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_called_damaged(tmp_path: Path, kind: str) -> None:
    good = write_tensors(tmp_path / f"good.{kind}", {"weight": torch.randn(64, 64)})
    bad = tmp_path / f"bad.{kind}"
    bad.write_bytes(good.read_bytes()[:-200])
    with pytest.raises(ValueError, match=rf"damaged or cut short \({bad.stat().st_size} bytes\); copy or download"):
        read_tensors(bad)


def test_a_misnamed_file_is_told_apart(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", _tensors()).rename(tmp_path / "b.pth")
    with pytest.raises(ValueError, match=r"b\.pth: by its name the file is torch, but safetensors wrote it"):
        read_tensors(tmp_path / "b.pth")
    write_tensors(tmp_path / "a.pth", _tensors()).rename(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors: by its name .* but torch wrote it; rename it .*\.pth"):
        read_tensors(tmp_path / "b.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_another_suffix_is_read_by_its_content(tmp_path: Path, kind: str) -> None:
    path = write_tensors(tmp_path / f"a.{kind}", _tensors()).rename(tmp_path / "pytorch_model.bin")
    _assert_equal(read_tensors(path), _tensors())


def test_no_file_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nope\.pth: there is no such file"):
        read_tensors(tmp_path / "nope.pth")
    folder = tmp_path / "folder.pth"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.pth"):
        read_tensors(folder)
    with pytest.raises(IsADirectoryError, match=r"folder\.pth: not saved, for this is a folder"):
        write_tensors(folder, _tensors())
    with pytest.raises(FileNotFoundError, match=r"a\.pth: not saved, for there is no folder .*missing; make it first"):
        write_tensors(tmp_path / "missing" / "a.pth", _tensors())


def test_old_and_repacked_torch_files(tmp_path: Path) -> None:
    old = tmp_path / "old.pth"
    torch.save(_tensors(), old, _use_new_zipfile_serialization=False)
    _assert_equal(read_tensors(old), _tensors())
    repacked = tmp_path / "repacked.pth"
    torch.save(_tensors(), tmp_path / "new.pth")
    with zipfile.ZipFile(tmp_path / "new.pth") as source, zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as to:
        for item in source.infolist():
            to.writestr(item.filename, source.read(item.filename))
    _assert_equal(read_tensors(repacked), _tensors())


def test_a_torch_file_is_mapped_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (calls.append(k), load(*a, **k))[1])
    read_tensors(write_tensors(tmp_path / "a.pth", _tensors()))
    assert [call["mmap"] for call in calls] == [True] and [call["weights_only"] for call in calls] == [True]


# Nothing but tensors is unpickled


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["whole", "namespace", "evil"])
def test_nothing_else_is_unpickled(tmp_path: Path, name: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    content = {
        "whole": nn.Linear(2, 2),
        "namespace": {"state_dict": _tensors(), "args": argparse.Namespace(lr=1)},
        "evil": {"state_dict": _tensors(), "x": _Evil(str(tmp_path / "pwned"))},
    }[name]
    path = tmp_path / f"{name}.pth"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    words = rf"{name}\.pth: .*(Linear|Namespace|mkdir).*save model\.state_dict\(\) alone"
    with pytest.raises(ValueError, match=words) as caught:
        read_tensors(path)
    assert "weights_only" not in str(caught.value)  # torch's own advice is to run what is in the file
    assert not (tmp_path / "pwned").exists()


# Wrappers


def test_a_bare_state_dict_is_itself() -> None:
    tensors = {**_tensors(), "model": torch.ones(1), "ema": torch.ones(1)}  # parameters may be called so
    assert open_wrapper(tensors, where="x") == tensors


@pytest.mark.parametrize("name", ["state_dict", "model", "model_state_dict", "model_ema", "state_dict_ema", "ema"])
def test_usual_wrappers_are_opened(name: str) -> None:
    tensors = _tensors()
    content = {"epoch": 3, name: tensors, "best": 0.5, "optimizer": {"state": {}}}
    assert open_wrapper(content, where="x") == tensors
    assert open_wrapper({"state_dict": content, "args": None}, where="x") == tensors


@pytest.mark.parametrize("raw", ["state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("ema", ["model_ema", "state_dict_ema", "ema"])
def test_raw_and_averaged_weights_are_not_guessed_between(raw: str, ema: str) -> None:
    content = {raw: _tensors(), ema: {"weight": torch.zeros(1)}}
    with pytest.raises(ValueError, match=rf"f\.pth: holds 2 sets of weights, {raw}, {ema}; choose one with key="):
        open_wrapper(content, where="f.pth")
    assert open_wrapper(content, where="f.pth", key=ema) == content[ema]
    assert open_wrapper(content, where="f.pth", key=raw) == content[raw]


def test_any_entry_can_be_chosen_and_is_offered() -> None:
    content = {"net": _tensors(), "epoch": 1}
    assert open_wrapper(content, where="f.pth", key="net") == content["net"]
    with pytest.raises(ValueError, match=r"f\.pth: not a state dict, .* epoch \(int\).*key= one of net"):
        open_wrapper(content, where="f.pth")
    with pytest.raises(ValueError, match=r"f\.pth: got key='nett', expected key= one of net"):
        open_wrapper(content, where="f.pth", key="nett")
    with pytest.raises(ValueError, match=r"f\.pth: holds list, expected a state dict"):
        open_wrapper([torch.ones(1)], where="f.pth")


def test_key_is_not_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got key='ema', but a safetensors file holds one set"):
        read_tensors(write_tensors(tmp_path / "a.safetensors", _tensors()), key="ema")


def test_metadata_is_read_without_tensors(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.safetensors", _tensors(), metadata={"epoch": "3"})
    assert read_metadata(path) == {"epoch": "3"}
    save_file(_tensors(), tmp_path / "b.safetensors")
    assert read_metadata(tmp_path / "b.safetensors") == {}
    with pytest.raises(ValueError, match="a torch file carries no metadata"):
        read_metadata(write_tensors(tmp_path / "a.pth", _tensors()))


@pytest.mark.parametrize("length", range(0, 256, 8))  # of the header: its lowest byte is the file's first
def test_a_safetensors_file_may_begin_with_any_byte(tmp_path: Path, length: int) -> None:
    path = write_tensors(tmp_path / "a.safetensors", _tensors(), metadata={"note": "x" * length})
    _assert_equal(read_tensors(path), _tensors())


# A save is whole or nothing


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, kind: str) -> None:
    path = write_tensors(tmp_path / f"keep.{kind}", _tensors())
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match=rf"keep\.{kind}: not saved, the former file is as it was"):
            write_tensors(path, {"weight": torch.zeros(256, 256)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "input/output error"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, kind: str, error: BaseException, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tensors(tmp_path / f"keep.{kind}", _tensors())
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        expected = OSError if isinstance(error, Exception) else KeyboardInterrupt
        with pytest.raises(expected):
            write_tensors(path, {"other": torch.zeros(3)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_save_leaves_the_old_file(tmp_path: Path, kind: str) -> None:
    path = write_tensors(tmp_path / f"keep.{kind}", _tensors())
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # the new content is written, not yet in place
        write_tensors(path, {"other": torch.zeros(3)})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    _assert_equal(read_tensors(path), _tensors())
    assert [file.suffix for file in tmp_path.iterdir() if file != path] == [".tmp"]


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(source: str, target: str) -> None:
        assert Path(source).parent == Path(target).parent
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_tensors(tmp_path / "a.safetensors", _tensors())
    assert steps == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not here")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    _assert_equal(read_tensors(write_tensors(tmp_path / "a.pth", _tensors())), _tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_savers_at_once_leave_one_whole_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    failures: list[BaseException] = []

    def save(value: int) -> None:
        try:
            for _ in range(4):
                write_tensors(path, {"t": torch.full((50_000,), float(value))})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert read_tensors(path)["t"].unique().numel() == 1
            seen += 1
    for thread in threads:
        thread.join()
    assert not failures and seen and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_the_mode_is_that_of_the_umask(tmp_path: Path, kind: str) -> None:
    old = os.umask(0o027)
    try:
        path = write_tensors(tmp_path / f"a.{kind}", _tensors())
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_is_written_through(tmp_path: Path, kind: str) -> None:
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / f"real.{kind}", tmp_path / f"link.{kind}"
    link.symlink_to(real)
    for value in (1.0, 2.0):  # the first time the link leads nowhere
        write_tensors(link, {"t": torch.tensor(value)})
        assert link.is_symlink() and read_tensors(real)["t"] == value
    assert sorted(tmp_path.rglob("*")) == sorted([tmp_path / "disk", real, link])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OSError, match=r"a\.pth: not saved, .*Permission denied"):
            write_tensors(tmp_path / "a.pth", _tensors())
    finally:
        tmp_path.chmod(0o700)


def test_saving_over_the_file_that_is_mapped(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "a.pth", {"t": torch.arange(5000.0)})
    mapped = read_tensors(path)
    write_tensors(path, {"t": mapped["t"] + 1})
    assert torch.equal(mapped["t"], torch.arange(5000.0)) and torch.equal(read_tensors(path)["t"], mapped["t"] + 1)
