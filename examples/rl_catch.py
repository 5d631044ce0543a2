"""Reinforcement learning with Ray: a policy with DDP, and actors that play, which share a placement group.

python examples/rl_catch.py
python examples/rl_catch.py --kill   # trains twice, and kills one of each in the second; the reward is the same

The player moves a paddle below a ball that falls, and learns by REINFORCE to catch it. Each iteration, the weights go
from the policy to the actors, and the games that they play go back. Ray itself restarts an actor that dies.
"""

import argparse
import os
import signal

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel

import raylaunch
import raylaunch.worker

WIDTH, HEIGHT, GAMES, PLAYERS = 7, 6, 64, 2
Tensors = dict[str, torch.Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.Tanh(), nn.Linear(32, 3))


class Policy:
    elastic = True  # ranks that did not fail keep their process and their object

    def __init__(self, lr: float) -> None:
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.state = raylaunch.worker.State(every=1, model=self.model, optimizer=self.optimizer)

    def weights(self) -> Tensors:
        return self.model.module.state_dict()

    def update(self, iteration: int, games: Tensors) -> None:
        chosen = torch.distributions.Categorical(logits=self.model(games["seen"])).log_prob(games["moves"])
        advantage = games["rewards"] - games["rewards"].mean()
        self.optimizer.zero_grad()
        (-chosen * advantage).mean().backward()
        self.optimizer.step()
        self.state.commit(iteration)


class Player:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = network()

    def pid(self) -> int:
        return os.getpid()

    @torch.no_grad()
    def play(self, weights: Tensors, seed: int) -> Tensors:
        """Play some games, which depend on the arguments only, so that an actor started anew plays the same."""
        torch.manual_seed(seed)
        self.model.load_state_dict(weights)
        ball, paddle = torch.randint(WIDTH, (GAMES,)), torch.randint(WIDTH, (GAMES,))
        seen, moves = [], []
        for _ in range(HEIGHT):
            seen.append(torch.cat([one_hot(ball, WIDTH), one_hot(paddle, WIDTH)], 1).float())
            moves.append(torch.distributions.Categorical(logits=self.model(seen[-1])).sample())
            paddle = (paddle + moves[-1] - 1).clamp(0, WIDTH - 1)
        rewards = (ball == paddle).float()
        return {"seen": torch.stack(seen), "moves": torch.stack(moves), "rewards": rewards}


def train(iterations: int, kill_at: int = -1) -> float:
    """Return the reward of the last games. `kill_at`: the iteration in which one of each is killed."""
    shared = placement_group([{"CPU": 1}] * PLAYERS)  # each bundle has a rank of the policy and a player
    players = [
        ray.remote(Player)
        .options(
            num_cpus=0.5,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(shared, bundle),
        )
        .remote()
        for bundle in range(PLAYERS)
    ]
    settings = {
        "placement_group": shared,
        "nproc_per_node": 1,
        "cpus_per_worker": 0.5,
        "max_restarts": 3,
        "show": "none",
    }
    with raylaunch.WorkerGroup(Policy, lr=0.02, **settings) as policy:
        iteration = 0
        while iteration < iterations:
            try:
                weights = ray.put(policy.call_one(0, "weights"))
                if iteration == kill_at:
                    kill_at = -1
                    for pid in (policy.ranks[1].pid, ray.get(players[0].pid.remote())):
                        os.kill(pid, signal.SIGKILL)
                playing = [player.play.remote(weights, PLAYERS * iteration + i) for i, player in enumerate(players)]
                policy.call("update", iteration, raylaunch.scatter(playing))
            except raylaunch.RankRestartedError as error:
                iteration = error.restart.completed  # what all ranks have committed
                print(f"a rank has died: resuming after iteration {iteration}", flush=True)
            else:
                iteration += 1
                reward = torch.stack([games["rewards"] for games in ray.get(playing)]).mean().item()
                if iteration % 20 == 0:
                    print(f"iteration {iteration}/{iterations} reward {reward:.3f}", flush=True)
    remove_placement_group(shared)
    return reward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--kill", action="store_true", help="train twice, and kill a rank and a player in the second")
    args = parser.parse_args()
    ray.init(log_to_driver=False)
    reward = train(args.iterations)
    print(f"final reward {reward!r}")
    if args.kill:
        again = train(args.iterations, kill_at=args.iterations // 2)
        print(f"final reward {again!r}, with a rank and a player killed in the middle")
        if again != reward:
            raise SystemExit("the rewards differ")


if __name__ == "__main__":
    main()
