"""What each example is, when a rank of it is killed, and what it promises then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


_FOURTH_LOG = r"(?s:'epoch'.*){4}"
"""The Trainer has logged four times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A script in `examples/`, which prints `resuming after step N` when it goes on, and `final loss X` at its end.

    Or one that does all of that by itself, as a notebook does.
    """

    script: str
    what: str
    """One line for README.md of the folder."""
    kill_at: str = ""
    """A regular expression: rank 1 is killed once the output has a match. "": it kills and compares by itself."""
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Modules besides torch and raylaunch."""
    files: str = ""
    """Where it goes on from under either launcher: a pattern of files in its working folder. "": from `State`."""
    tolerance: float = 0.0
    """How much the final loss may differ from an undisturbed run's, relatively. 0: not in a bit."""

    @property
    def name(self) -> str:
        """Which one it is, for a person, and for the command line of the runner."""
        return " ".join((self.script.partition(".")[0], *self.arguments))

    @property
    def lacks(self) -> list[str]:
        """Return the modules that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


EXAMPLES = (
    Example(
        script="digits.py",
        what="`State` in a whole script of 50 lines: DistributedDataParallel on scikit-learn's handwritten digits",
        kill_at=r"step 200/",
        needs=("sklearn",),
    ),
    Example(
        script="train_charlm.py",
        what="`elastic`: a small transformer on Python's own source, whose ranks stay when another one dies",
        arguments=("--steps", "120", "--files", "8"),
        kill_at=r"step +40/",
    ),
    Example(
        script="hf_trainer.py",
        what="the `Trainer` of transformers, unchanged, which writes checkpoints and goes on from them",
        kill_at=_FOURTH_LOG,
        needs=("transformers", "accelerate"),
        files="checkpoints/checkpoint-40/trainer_state.json",
    ),
    Example(
        script="hf_trainer.py",
        what="the same with `StateTrainerCallback`, which needs no checkpoints",
        arguments=("--state",),
        kill_at=_FOURTH_LOG,
        needs=("transformers", "accelerate"),
    ),
    Example(
        script="fsdp2.py",
        what="FSDP2 with checkpoints of torch.distributed.checkpoint, which any number of ranks can load",
        kill_at=r"step 60/",
        files="checkpoints/step-000050/.metadata",
    ),
    Example(
        script="pretrain.py",
        what="pretraining in nanoGPT's manner: tokens in a mapped file, accumulated gradients, one checkpoint",
        kill_at=r"iter 40:",
        files="out/ckpt.pt",
    ),
    Example(
        script="lightning_digits.py",
        what="Lightning with `StateCallback`, which goes on in its epoch with the next sample",
        kill_at=r"step 120 ",
        needs=("lightning", "sklearn"),
    ),
    Example(
        script="accelerate_digits.py",
        what="accelerate with `State`, accumulated gradients, and a loader that goes on with the next sample",
        kill_at=r"step 200 ",
        needs=("accelerate", "sklearn"),
    ),
    Example(
        script="trackers.py",
        what="TensorBoard, W&B and MLflow, which go on in the same run after a restart, without a network",
        kill_at=r"step 100 ",
        needs=("tensorboard", "wandb", "mlflow"),
    ),
    Example(
        script="rl_catch.py",
        what="reinforcement learning with `WorkerGroup`: a policy with DDP and actors of Ray, one of each of which is killed",
        arguments=("--kill",),
    ),
    Example(
        script="verl_adapter.py",
        what="verl's `RayWorkerGroup` in 120 lines on `WorkerGroup`, and a program that uses it, one of whose ranks is killed",
        arguments=("--kill",),
    ),
    Example(
        script="notebook.ipynb",
        what="`raylaunch.launch` and `start` in a notebook, which kills one of its workers and compares the results",
        needs=("nbclient", "ipykernel", "sklearn"),
    ),
)


def chosen(names: Iterable[str]) -> list[Example]:
    """Return the examples with these names, or all; a script's name stands for all its variants.

    Raises ValueError for a name that no example has.
    """
    wanted = set(names)
    known = {example.name.partition(" ")[0] for example in EXAMPLES}
    if wanted - known:
        msg = f"no example is called {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known))}"
        raise ValueError(msg)
    return [example for example in EXAMPLES if not wanted or example.name.partition(" ")[0] in wanted]
