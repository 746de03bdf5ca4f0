"""What a local objective may not do, refused where one client trains alone too, as `vmap` refuses it for several."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedcli.core.clients import Aux, Client, Step, Update, under_vmap
from fedcli.core.federation import Cohort, Federation


class Refusing(TorchDispatchMode):
    """Refuses operations that clients who train together cannot do, in the line that does one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to keep its compiler, which is not used, out of this, PyTorch would import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls an operation, unless it is one of those; attention without dropout may draw, and does not."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in function.tags:
            reads = "reads a number out of a tensor, as .item(), float() and if do; use torch.where"
            raise RuntimeError(f"a local objective {reads}")
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        result = function(*args, **kwargs)
        if not torch.equal(before, generator.get_state()):
            raise RuntimeError("a local objective draws random numbers; what is drawn comes with the batch")
        return result


class Strict(Federation):
    """A federation that looks at the first local step of each training in its first round."""

    _round: int | None = None

    def train(self, clients: Client, cohort: Cohort, local: Any, *more: Any, **options: Any) -> Any:
        """As in `Federation`."""
        self._round = cohort.round if self._round is None else self._round
        if cohort.round == self._round and self.device.type == "cpu":
            step = local if isinstance(local, Step) else self.optimizer_step(local)
            unseen = [True]
            in_place = step.in_place and _refuse_once(step.in_place, unseen)
            local = Step(_refuse_once(step.update, unseen), step.init_optimizer, in_place)
        return super().train(clients, cohort, local, *more, **options)


def _refuse_once(update: Update, unseen: list[bool]) -> Update:
    """Returns the same update, refusing what it should not do in the first call for a client alone, if it is unseen."""

    def run(client: Client, batch: Any, context: Any) -> tuple[Client, Aux]:
        if not unseen or under_vmap.get():
            return update(client, batch, context)
        unseen.clear()
        with Refusing():
            return update(client, batch, context)

    return run
