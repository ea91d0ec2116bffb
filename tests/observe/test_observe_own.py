"""The user's own observer is found before anything starts; panels; and whether a server answers."""

import doctest
import socket

import pytest

from rftcli.errors import UsageError
from rftcli.observe import panels
from rftcli.observe.own import Own, observer_class
from rftcli.observe.reach import answers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be imported: ModuleNotFoundError"),
        ("1/0", "cannot be imported: ZeroDivisionError"),
        ("class Other:\n    pass", "has no class `Mine`"),
        ("Mine = 3", "has no class `Mine`"),
        ("class Mine:\n    pass", "has no method `see"),
    ],
)
def test_what_is_wrong_with_it(tmp_path, monkeypatch, text, says):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"observer_{abs(hash(says + str(text)))}"
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        observer_class(f"{name}:Mine", str(tmp_path))
    assert caught.value.hint


def test_one_without_arguments_and_close(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "observer_small.py").write_text("class Mine:\n    seen = []\n    def see(self, event):\n        self.seen.append(event)\n")
    own = Own(tmp_path, {"target": "observer_small:Mine", "folder": str(tmp_path)})
    own.see("event")
    own.close()
    own.close()
    assert observer_class("observer_small:Mine", str(tmp_path)).seen == ["event"]


def test_panels():
    assert doctest.testmod(panels).failed == 0
    assert set(panels.PANELS.values()) | set(panels.RENAMED.values()) <= set(panels.NAMES)
    assert panels.in_panels({"brand_new": 1.0}) == {"other/brand_new": 1.0}


def test_a_server_that_answers(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(f"http://127.0.0.1:{port}/path")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
        assert answers("http://somewhere.invalid")  # asked for through the proxy
    monkeypatch.delenv("http_proxy")
    assert not answers(f"http://127.0.0.1:{port}") and not answers("http://somewhere.invalid", seconds=0.5)
