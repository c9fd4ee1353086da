"""The sweep on a GPU that several processes share."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import zoo
from zoo.isolation import undisturbed
from zoo.sweep import Task, sweep
from zoo.sweep.examining import examine
from zoo.sweep.lines import read


def test_two_processes_on_one_gpu(tmp_path):
    file = tmp_path / "out.jsonl"
    names = ["timm/test_vit", "torchvision/squeezenet1_1", "timm/test_byobnet", "mlp"]
    found = sweep(names, device="cuda", small=True, processes=2, out=file)
    assert found.ok, str(found)
    assert [row.name for row in found.rows] == names and found.share == 1.0
    assert all(row.parity.ok and row.peak_bytes > 0 for row in found.rows)
    assert sorted(row.name for row in read(file)) == sorted(names)
    assert sweep(names, device="cuda", small=True, processes=2, out=file).resumed == len(names)


def test_lean_takes_less_memory():
    rows = []
    for lean in (False, True):
        gc.collect()  # as a worker does between two models: what the first left would count for the second
        rows.append(examine(Task("timm/vit_small_patch16_224", device="cuda", lean=lean)))
    plain, lean = rows
    assert plain.ok and lean.ok, (plain, lean)
    assert lean.lean and lean.peak_bytes < plain.peak_bytes


def test_convolutions_run_in_float32_proper():
    assert torch.backends.cudnn.allow_tf32, "this case should be one"
    row = examine(Task("resnet18", device="cuda", small=True, gradients=False))
    assert row.ok and row.parity.worst == "output" and row.parity.error < 1e-5, row  # TF32 leaves 1e-4 and more
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["timm/levit_128", "timm/efficientvit_m0", "timm/efficientnet_cc_b1_8e"])
def test_results_kept_in_eval_mode_and_gates_that_saturate(name):
    """The first two keep a result with its graph; the gates of the last saturate, unless batch norms have a scale."""
    row = examine(Task(name, device="cuda"))
    assert row.ok and row.batch_norms > 0 and row.parity.blank == 0, row
    assert row.parity.limit < 1e-3 or "cc" not in name, row


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fc = nn.LSTM(24, 24, num_layers=2, dropout=0.1, bidirectional=True), nn.Linear(48, 8)

    def forward(self, x):
        return self.fc(self.inner(x)[0])


def test_recurrent_layers_are_differentiated():
    """cuDNN refuses to in eval mode, in which parity runs."""
    model, x = Recurrent().cuda().eval(), torch.randn(6, 4, 24, device="cuda")
    with pytest.raises(RuntimeError, match="training mode"):
        model(x).sum().backward()
    custom = zoo.patch(copied := copy.deepcopy(model))
    report = zoo.parity(copied, model, x, gradients=True)
    assert report.ok and custom.swapped == ("fc",), report
    assert "inner.weight_hh_l1_reverse" in {entry.name for entry in report.entries}
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("work", ["parity", "undisturbed"])
def test_waits_for_the_gpu_do_not_grow_with_the_model(work):
    def waits(depth):
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(depth)]
        model, x = nn.Sequential(*blocks).cuda().eval(), torch.randn(2, 4, 8, 8, device="cuda")
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                if work == "parity":
                    assert zoo.parity(model, model, x, gradients=True).ok
                else:
                    with undisturbed(model):
                        model(x)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return sum("synchroniz" in str(warning.message) for warning in said)

    waits(1)  # the first waits for what is loaded once, too
    assert waits(12) == waits(2) > 0
