"""The pytest plugin, installed as its entry point says, in pytest's own sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import zoo

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest_plugins = ["pytester"]

PACKAGE = Path(zoo.__file__).parent
ROOT = Path(__file__).parent.parent
LAYERS = """
import os
import torch.nn.functional as F


def right(input, weight, bias):
    return F.linear(input, weight, bias)


def wrong(input, weight, bias):
    if bias is None:
        raise NotImplementedError("a layer without bias is not supported")
    if input.shape[-1] == 2048:
        os._exit(3)
    return F.linear(input.nan_to_num(), weight, bias)


def norm(input, normalized_shape, weight, bias, eps):
    return F.layer_norm(input, normalized_shape, weight, bias, eps)
"""


@pytest.fixture
def sandbox(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder to run pytest in, with the plugin installed, and layers in a module."""
    site = tmp_path / "site"
    info = site / "layer_zoo-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layer-zoo\nVersion: 0\n", encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ((name, module),) = project["project"]["entry-points"]["pytest11"].items()
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n", encoding="utf-8")
    (site / module).symlink_to(ROOT / project["tool"]["setuptools"]["package-dir"][module])
    paths = [str(site), str(PACKAGE.parent), str(pytester.path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "")
    pytester.makepyfile(brought=LAYERS)
    return pytester


def test_each_verdict_in_pytests_terms(sandbox: pytest.Pytester) -> None:
    sandbox.makepyfile(test_own="def test_own():\n    assert True\n")
    claims = [f"--zoo-claim={name}" for name in ("values", "no-bias", "nan", "opcheck")]
    result = sandbox.runpytest_subprocess(
        "--zoo-layer=brought:wrong", *claims, "-rfsx", "--strict-markers", "-k", "not own"
    )
    result.assert_outcomes(passed=1, failed=2, skipped=1, xfailed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "zoo: 5 claims about brought:wrong (linear, on cpu, seed 0)",
            "collected 6 items / 1 deselected / 5 selected",
            "fail: its process ended with exit code 3",
            "again: zoo verify brought:wrong --kind linear --claim values --device cpu --seed 0",
            "claimed: a NaN comes through in its own row, and nowhere else",
            "fail: 48 of 3072 outputs are nan where the stock layer's are not*",
            "SKIPPED*it calls no operators but torch's own",
            "XFAIL zoo/brought:wrong::no-bias*refused: *NotImplementedError: a layer without bias is not supported*",
        ]
    )


def test_models(sandbox: pytest.Pytester) -> None:
    options = ["--zoo-layer=brought:right", "--zoo-models=mlp", "--zoo-claim=model-outputs@*", "-v"]
    result = sandbox.runpytest_subprocess(*options)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["zoo/brought:right::model-outputs@mlp PASSED*"])


def test_strict(sandbox: pytest.Pytester) -> None:
    options = ["--zoo-layer=brought:wrong", "--zoo-claim=no-bias", "--zoo-strict", "-rf"]
    result = sandbox.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["FAILED zoo/brought:wrong::no-bias*"])


@pytest.mark.slow
def test_with_xdist(sandbox: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    sandbox.makepyfile(test_own="def test_own():\n    assert True\n")
    options = ["--zoo-layer=brought:norm", "--zoo-kind=layer_norm", "--zoo-claim=values", "--zoo-claim=eps", "-n2"]
    result = sandbox.runpytest_subprocess(*options)
    result.assert_outcomes(passed=4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--zoo-layer=brought:right", "--zoo-claim=velues"], "no claim matches 'velues'"),
        (["--zoo-layer=brought:right", "--zoo-models=mlpp"], "unknown model 'mlpp'"),
        (["--zoo-layer=brought:nobody", "--zoo-claim=values"], "there is no 'nobody'; there are norm, right, wrong"),
    ],
)
def test_wrong_options(sandbox: pytest.Pytester, options: list[str], text: str) -> None:
    result = sandbox.runpytest_subprocess(*options)
    assert result.ret != 0
    assert text in result.stdout.str() + result.stderr.str()


def test_without_the_option_torch_is_not_imported(sandbox: pytest.Pytester) -> None:
    sandbox.makepyfile(test_own="import sys\ndef test_own():\n    assert not {'torch', 'zoo'} & set(sys.modules)\n")
    result = sandbox.runpytest_subprocess("-v")
    result.assert_outcomes(passed=1)
    assert "zoo" in " ".join(line for line in result.outlines if line.startswith("plugins:"))


def test_the_fixture(sandbox: pytest.Pytester) -> None:
    sandbox.makepyfile(
        test_own="""
        import brought

        def test_right(zoo_verify):
            assert zoo_verify(brought.right, claims=["values", "nan"]).counts["pass"] == 3

        def test_wrong(zoo_verify):
            zoo_verify(brought.wrong, claims="nan")
        """
    )
    result = sandbox.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CheckFailed*"])
