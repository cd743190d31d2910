"""An actor-critic on a toy environment: its update as pieces, and as one graph."""

import time

import torch
from torch import nn

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")
ENVIRONMENTS, HORIZON, DISCOUNT = 64, 16, 0.95


class ActorCritic(nn.Module):
    """Push left or right, to hold a cart at zero."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.policy, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(state)
        return self.policy(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


@torch.no_grad()
def play(model: ActorCritic) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, actions and discounted returns of a few steps in all environments."""
    state = torch.randn(ENVIRONMENTS, 2, device=DEVICE)
    states, actions, rewards = [], [], []
    for _ in range(HORIZON):
        scores, _ = model(state)
        action = torch.multinomial(scores.exp(), 1).squeeze(-1)
        states.append(state)
        actions.append(action)
        position, speed = state.unbind(-1)
        speed = speed + 0.2 * (2 * action - 1)
        state = torch.stack([position + 0.2 * speed, 0.9 * speed], -1)
        rewards.append(-state.square().sum(-1))
    returns = torch.zeros(ENVIRONMENTS, device=DEVICE)
    found = []
    for reward in reversed(rewards):
        returns = reward + DISCOUNT * returns
        found.append(returns)
    return torch.cat(states), torch.cat(actions), torch.cat(found[::-1])


def train(*, as_one_graph: bool) -> tuple[list[float], float]:
    """Losses of a few updates, and milliseconds of a later one."""
    torch.manual_seed(0)
    model = ActorCritic().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def loss_fn(states: torch.Tensor, actions: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        scores, values = model(states)
        advantage = (returns - values).detach()
        chosen = scores.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        entropy = -(scores.exp() * scores).sum(-1).mean()
        return -(chosen * advantage).mean() + (returns - values).square().mean() - 0.01 * entropy

    if as_one_graph:
        update = cgpass.train_step(loss_fn, optimizer, max_norm=0.5)
    else:
        compiled = torch.compile(loss_fn, backend="cgpass")

        def update(*batch: torch.Tensor) -> torch.Tensor:
            loss = compiled(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    losses, times = [], []
    for _ in range(30):
        batch = play(model)
        wait()
        start = time.perf_counter()
        loss = update(*batch)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    if isinstance(update, cgpass.TrainStep):
        print(update.explain())
    return losses, sorted(times[10:])[10]


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    for name, as_one_graph in (("pieces", False), ("one graph", True)):
        losses, ms = train(as_one_graph=as_one_graph)
        timed = (
            f", {ms:.3f} ms an update" if DEVICE == "cuda" else ""
        )  # a simulation's times mean nothing
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}{timed}")


if __name__ == "__main__":
    main()
