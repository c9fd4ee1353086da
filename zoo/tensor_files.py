"""Files of named tensors, read and written: ``.safetensors`` and torch's ``.pth``. Knows nothing of models.

Reading unpickles nothing but tensors, tells what is wrong with a file that is none, and maps the tensors from the disk
where it can. Writing replaces the old file in one step, or leaves it as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

__all__ = [
    "PathLike",
    "check_suffix",
    "file_kind",
    "on_host",
    "open_wrapper",
    "read_metadata",
    "read_tensors",
    "replacing",
    "write_tensors",
]

PathLike = str | os.PathLike[str]
Kind = Literal["safetensors", "torch"]

_SUFFIXES: dict[str, Kind] = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch"}
_RAW = ("state_dict", "model", "model_state_dict")
_EMA = ("state_dict_ema", "model_ema", "ema", "ema_state_dict")


def check_suffix(path: PathLike) -> Kind:
    """The kind of file that the name of ``path`` promises. Raises ValueError for another suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{path}: got the suffix {suffix!r}, expected {', '.join(_SUFFIXES)}; rename the file")
    return _SUFFIXES[suffix]


# Reading


def read_tensors(path: PathLike, *, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, in the file's order (safetensors keeps none: sorted by the format).

    ``key`` names the entry of a torch file that holds the state dict where :func:`open_wrapper` cannot know.
    Raises OSError where the file cannot be opened and ValueError, naming it, where it does not hold tensors.
    """
    if file_kind(path) == "safetensors":
        if key is not None:
            raise ValueError(f"{path}: got key={key!r}, but a safetensors file holds one set of weights; leave it out")
        with _damage_named(path):
            return safetensors.torch.load_file(path, device="cpu")
    return open_wrapper(_read_torch(path), where=str(path), key=key)


def read_metadata(path: PathLike) -> dict[str, str]:
    """The text entries in the header of a safetensors file; no tensor is read."""
    if file_kind(path) != "safetensors":
        raise ValueError(f"{path}: a torch file carries no metadata, expected a .safetensors file")
    with _damage_named(path), safetensors.safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def file_kind(path: PathLike) -> Kind:
    """What the content of ``path`` is by its first bytes.

    Raises OSError where it cannot be opened, ValueError where it is neither or is what its suffix denies.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file; check the path (from {os.getcwd()})") from None
    text = head.lstrip().lower()
    if not head:
        raise ValueError(f"{path}: the file is empty; copy or download it again")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path}: the file is a web page, not a checkpoint; the download failed, fetch it again")
    if text.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: the file is a Git LFS pointer, not the checkpoint itself; run `git lfs pull`")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:  # first: a length may begin with any byte
        kind: Kind = "safetensors"
    elif head.startswith((b"PK\x03\x04", b"\x80")):
        kind = "torch"
    else:
        raise ValueError(f"{path}: neither safetensors nor torch.save wrote this file (it begins with {head[:12]!r})")
    named = _SUFFIXES.get(Path(path).suffix.lower(), kind)
    if named != kind:
        right = ".safetensors" if kind == "safetensors" else ".pth"
        raise ValueError(f"{path}: by its name the file is {named}, but {kind} wrote it; rename it to end in {right}")
    return kind


def open_wrapper(content: Any, *, where: str, key: str | None = None) -> dict[str, Tensor]:
    """The state dict inside ``content``: itself, or what lies under the usual names (``state_dict``, ``model``, ...).

    Several sets of weights (raw and EMA, say) are a ValueError that names them; ``key`` chooses one, or another entry.
    """
    if key is not None:
        if not isinstance(content, Mapping) or not isinstance(content.get(key), Mapping):
            raise ValueError(f"{where}: got key={key!r}, expected {_entries(content)}")
        content = content[key]
    while isinstance(content, Mapping):
        sets = [name for name in (*_RAW, *_EMA) if isinstance(content.get(name), Mapping)]
        if len(sets) > 1:
            raise ValueError(f"{where}: holds {len(sets)} sets of weights, {', '.join(sets)}; choose one with key=...")
        if not sets:
            break
        content = content[sets[0]]
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: holds {type(content).__name__}, expected a state dict; save model.state_dict()")
    alien = [name for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if alien:
        some = ", ".join(f"{name} ({type(content[name]).__name__})" for name in alien[:8])
        raise ValueError(
            f"{where}: not a state dict, for {len(alien)} of {len(content)} entries are not tensors: {some}; "
            f"expected tensors alone, or {_entries(content)}"
        )
    opened = OrderedDict(content)
    if hasattr(content, "_metadata"):  # the versions of the modules that wrote it, which torch keeps beside the keys
        opened._metadata = content._metadata  # type: ignore[attr-defined]
    return opened


def _entries(content: Any) -> str:
    items = content.items() if isinstance(content, Mapping) else ()
    names = [str(name) for name, value in items if isinstance(value, Mapping)]
    return f"key= one of {', '.join(names)}" if names else "a file that holds a state dict under that name"


def _read_torch(path: PathLike) -> Any:
    try:
        with _damage_named(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_mappable(path))
    except pickle.UnpicklingError as error:
        # Of torch's text only the name: the rest of it recommends to run whatever the file holds.
        asked = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path}: the file holds more than weights{f' (a {asked[1]})' if asked else ', or is no torch file'}, and "
            "zoo unpickles nothing but weights. Where you trust it, load it with torch yourself and save "
            "model.state_dict() alone, by torch.save or zoo.save_checkpoint"
        ) from error


def _mappable(path: PathLike) -> bool:
    # Files of torch < 1.6 are no zip archives, and one that a zip tool packed again holds no tensor byte for byte.
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        with zipfile.ZipFile(file) as archive:
            return all(item.compress_type == zipfile.ZIP_STORED for item in archive.infolist())


@contextlib.contextmanager
def _damage_named(path: PathLike) -> Iterator[None]:
    # Which exception a damaged file raises, and with what text, changes between releases of torch and safetensors.
    try:
        yield
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{path}: the file is damaged or cut short ({os.path.getsize(path)} bytes); copy or download it again. "
            f"{reason}"
        ) from error


# Writing


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These tensors, detached, on the CPU.

    A GPU's small ones are asked for together and waited for once: a wait each would be as long as what is in its
    queue, that of other processes included.
    """

    def fetched(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda or tensor.nbytes > _LARGE:
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    found = [fetched(tensor.detach()) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return found


_LARGE = 1 << 22
"""Bytes: of a tensor that takes its time whether waited for or not, and that is better not in page-locked memory."""


def write_tensors(
    path: PathLike,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    versions: Mapping[str, Any] | None = None,
) -> Path:
    """Write tensors by name to ``path`` and return it; equal tensors and metadata make equal files.

    ``metadata`` goes into the header of a safetensors file, ``versions`` (a state dict's ``_metadata``) into a torch
    file. A symbolic link is written through. Raises ValueError for what the format cannot hold and OSError, naming
    the file, where the writing failed: then the old file is as it was.
    """
    kind = check_suffix(path)
    dense = _dense(tensors, str(path))
    if kind == "safetensors":
        apart = _apart(dense)
        with replacing(path) as temporary:
            try:
                safetensors.torch.save_file(apart, temporary, metadata=dict(metadata or {}))
            except KeyError as error:
                raise ValueError(f"{path}: safetensors cannot hold {error}; save as .pth instead") from error
            _sort_metadata(temporary)
    else:
        content = OrderedDict(dense)
        if versions is not None:
            content._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
        # Through a file object, as torch.save writes the name of a path into the archive.
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.save(content, file)
    return Path(path)


def _dense(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Plain CPU tensors that keep no storage beyond their own alive; what was one tensor stays one."""
    distinct: dict[Any, Tensor] = {}
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where}: {name} is {type(tensor).__name__}, expected a tensor; only tensors are saved")
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{where}: {name} is a lazy parameter without values; run the model once before saving")
        if tensor.is_meta:
            raise ValueError(f"{where}: {name} is on the meta device, without values; build the model on a real device")
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{where}: {name} is a {type(tensor).__name__}, expected a plain tensor; gather a sharded model first "
                "(torch.distributed.checkpoint.state_dict), save a quantized one before it is quantized"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{where}: {name} is sparse ({tensor.layout}), expected a dense tensor; call to_dense()")
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        identity = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        entries[name] = identity if tensor.numel() else name
        distinct.setdefault(entries[name], tensor)
    plain = dict(zip(distinct, map(_compact, on_host(list(distinct.values()))), strict=True))
    return {name: plain[entry] for name, entry in entries.items()}


def _compact(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, none sharing memory with another: safetensors refuses both."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.contiguous()
        if tensor.numel():
            if apart[name].untyped_storage().data_ptr() in seen:
                apart[name] = apart[name].clone()
            seen.add(apart[name].untyped_storage().data_ptr())
    return apart


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place if the body succeeds, and is removed if it does not."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: not saved, for there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise IsADirectoryError(f"{path}: not saved, for this is a folder; add the name of a file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # The mode is the one that the umask leaves; safetensors would make the file private to its owner.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        yield temporary
        os.chmod(temporary, mode)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise OSError(f"{path}: not saved, the former file is as it was: {type(error).__name__}: {error}") from error
    # The new file is in place: a file system that cannot sync folders is no reason to call the save failed.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sort_metadata(path: Path) -> None:
    # safetensors writes the metadata in random order; sorted, equal content has an equal SHA-256.
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))
