"""Stand-ins for the modules `wandb` (0.31) and `swanlab` (0.10), with the parts of their interfaces that we use.

As theirs, a run holds back what is logged until it is finished; without a key `init` raises unless it is to be offline.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any


class ServiceRun:
    """What `init` returns; writes `records.json` into its folder when it is finished."""

    def __init__(self, folder: Path, told: Mapping[str, Any]) -> None:
        self.folder, self.told = folder, dict(told)
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    def __enter__(self) -> "ServiceRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((step, data))

    def finish(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "records.json").write_text(json.dumps([self.told, self.logged]))


class Wandb:
    """The module. `errors.Error` is the base of what `init` raises."""

    errors = SimpleNamespace(Error=type("Error", (Exception,), {}))

    def __init__(self, key: bool) -> None:
        self.key = key

    def init(
        self,
        *,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        mode: str | None = None,
        resume: str | None = None,
    ) -> ServiceRun:
        if mode != "offline" and not self.key:
            raise self.errors.Error("No API key configured. Use `wandb login` to log in.")
        told = {"project": project, "id": id, "name": name, "config": config, "mode": mode, "resume": resume}
        return ServiceRun(Path(dir or ".") / "wandb", told)


class Swanlab:
    """The module. Without a terminal to ask for a key `init` raises RuntimeError, with a wrong one its own error."""

    exceptions = SimpleNamespace(AuthenticationError=type("AuthenticationError", (Exception,), {}))

    def __init__(self, key: bool, refused: bool = False) -> None:
        self.key, self.refused = key, refused

    def init(
        self,
        *,
        log_dir: str | None = None,
        mode: str | None = None,
        project: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> ServiceRun:
        if mode != "offline" and self.refused:
            raise self.exceptions.AuthenticationError("Failed to initialize the SwanLab client.")
        if mode != "offline" and not self.key:
            raise RuntimeError(
                "Failed to initialize SwanLab in online mode: no TTY is available for interactive login."
            )
        told = {"project": project, "name": name, "config": config, "mode": mode}
        return ServiceRun(Path(log_dir or "."), told)
