"""The process that speaks to W&B: one logged run as JSON on stdin, and out; see tracking.py, which starts it.

Exit code 0: logged. 3: W&B has no valid key. 1: anything else; the last line of stderr says what.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from structkv_bench.errors import kind_and_line

NO_KEY = 3


def main() -> int:
    """Log what stdin describes (`tracking.Logged`); given `check`, only see whether there is a key."""
    try:
        import wandb
    except Exception as error:  # not installed, or broken: whatever its import raises
        return _said(error, 1)
    try:
        if sys.argv[1:] == ["check"]:
            wandb.login(verify=False)
        else:
            _log(wandb, json.load(sys.stdin))
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        return _said(error, NO_KEY)
    except Exception as error:  # its service, its network, its answers
        return _said(error, 1)
    return 0


def _said(error: Exception, code: int) -> int:
    print(kind_and_line(error), file=sys.stderr)
    return code


def _log(wandb: Any, logged: dict[str, Any]) -> None:
    # where offline artefacts wait: beside the run, not in the user's home
    os.environ.setdefault("WANDB_DATA_DIR", f"{logged['init']['dir']}/wandb")
    settings = wandb.Settings(
        init_timeout=logged["init_timeout"],
        silent=True,
        console="off",
        disable_code=True,
        x_disable_stats=True,  # of the machine: the evaluation is over
    )
    run = wandb.init(**logged["init"], resume="allow" if logged["init"]["id"] else None, settings=settings)
    run.config.update(logged["config"], allow_val_change=True)
    tables = {name: wandb.Table(**table) for name, table in logged["tables"].items()}
    images = {name: wandb.Image(path) for name, path in logged["images"].items()}
    run.log(tables | images)
    run.summary.update(logged["summary"])
    if logged["files"]:
        artifact = wandb.Artifact(f"results-{run.id}", type="results")
        for name, path in logged["files"].items():
            artifact.add_file(path, name=name)
        run.log_artifact(artifact)
    run.finish()


if __name__ == "__main__":
    sys.exit(main())
