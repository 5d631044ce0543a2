"""What torchrun makes of many command lines. In: [{"argv", "env", "only_parse"}]."""

import json
import os
import sys

from torch.distributed import run

before = dict(os.environ)


def ask(argv, env, only_parse):
    os.environ.clear()
    os.environ.update(before | env)
    try:
        if not only_parse:
            run.main(argv)
            return {"error": None}
        config, _, _ = run.config_from_args(run.parse_args(argv))
    except SystemExit as error:
        return {"error": "SystemExit", "text": str(error.code)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {
        "error": None,
        "nnodes": [config.min_nodes, config.max_nodes],
        "nproc_per_node": config.nproc_per_node,
        "shutdown_timeout": getattr(config, "shutdown_timeout", None),  # not in torch 2.6
        "redirects": repr(config.logs_specs._redirects),  # noqa: SLF001 - torchrun shows it nowhere
        "tee": repr(config.logs_specs._tee),  # noqa: SLF001
    }


json.dump([ask(**question) for question in json.load(sys.stdin)], sys.stdout)
