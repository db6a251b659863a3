"""`python3 -m fa3` says where attention runs. Needs torch."""

import runpy

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import fa3


def said(monkeypatch, capsys, function):
    """The exit code, and what is printed, where `function` computes attention."""
    monkeypatch.setattr(fa3, "flash_attn_func", function)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fa3", run_name="__main__")
    return end.value.code, capsys.readouterr().out


def refused(*_):
    raise RuntimeError("device A has compute capability 8.0, the kernels need 9.0")


def test_it_says_what_runs(monkeypatch, capsys):
    code, text = said(monkeypatch, capsys, fa3.flash_attn_func)
    assert code == 0 and "attention on the CPU: runs, largest error" in text


def test_it_says_why_not(monkeypatch, capsys):
    code, text = said(monkeypatch, capsys, refused)
    assert code == 0 and "attention on the CPU: device A has compute capability 8.0" in text


def test_a_wrong_result_fails(monkeypatch, capsys):
    code, text = said(monkeypatch, capsys, lambda q, k, v: q)
    assert code == 1 and "attention on the CPU: is wrong: largest error" in text
