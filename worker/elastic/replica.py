"""What a rank that joins takes from one that is there: parameters, inner, outer, and the place.

JSON and tensors with digests (wire.py); nothing is unpickled. What only one rank has (SCAPE's
residual and owner's state) is not among it: that moves when the group forms.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import torch
from torch import Tensor

from loco.inner.base import InnerOptimizer
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.wire import WireError, digest_of, piece_digests, receive_tensor
from worker.exchange import Exchange
from worker.progress import Progress, pack, unpack
from worker.pulse import Pulse
from worker.session import Session
from worker.structure import pack_structure, unpack_structure
from worker.trainer import Trainer


class WorkerReplica:
    """The whole state of one worker, as its site gives and takes it."""

    def __init__(
        self,
        trainer: Trainer,
        exchange: Exchange,
        progress: Progress,
        session: Session,
        pulse: Pulse,
    ) -> None:
        self._trainer = trainer
        self._exchange = exchange
        self._progress = progress
        self._session = session
        self._pulse = pulse
        self._beside: dict[str, Tensor] = {}
        self._known: dict[str, list[str]] = {}

    @property
    def optimizer(self) -> InnerOptimizer:
        return self._trainer.optimizer

    def divided(self) -> None:
        """The site's rank or number of ranks is another now."""
        self._trainer.divided()

    def give_beside(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What changes once a round at most, shared; called while this rank trains."""
        frozen = {n: p.detach() for n, p in self._parameters() if not p.requires_grad}
        named = {f"parameter {name}": tensor for name, tensor in frozen.items()}
        named |= {f"outer {name}": tensor for name, tensor in self._exchange.lasting().items()}
        return {"tensors": _described(named)}, named

    def take_beside(self, connection: socket.socket, header: dict[str, Any]) -> int:
        """Keep what another rank's `give_beside` gives until `take`; its bytes.

        Raises:
            WireError: a digest is not right.
        """
        for name, dtype, shape in header["tensors"]:
            self._beside[name] = _empty(dtype, shape)
            receive_tensor(connection, self._beside[name], name)
        self._known = {name: piece_digests(tensor) for name, tensor in self._beside.items()}
        return sum(tensor.nbytes for tensor in self._beside.values())

    def known(self) -> dict[str, list[str]]:
        """Digests of the pieces that `take_beside` has brought, by tensor."""
        return self._known

    def give(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything that all ranks have alike; the tensors are shared."""
        structure, inner = pack_structure(self.optimizer.common_state())
        about, outer = self._exchange.give()
        named = {f"parameter {name}": p.detach() for name, p in self._parameters()}
        named |= {f"inner {i}": tensor for i, tensor in enumerate(inner)}
        named |= {f"outer {name}": tensor for name, tensor in outer.items()}
        pending = self._progress.pending
        for number, body in (pending.shards if pending else {}).items():
            named[f"shard {number}"] = _tensor(body)
        with self._pulse.edit() as beat:
            told = pack(beat)
        header = {
            "progress": self._progress.facts(),
            "steps": [self._trainer.local_steps, self._trainer.data_cursor],
            "notes": self._progress.notes(),
            "caller": pack(self._session.caller),
            "beat": told,
            "inner": structure,
            "outer": about,
            "tensors": _described(named),
        }
        return header, named

    def digest(self) -> str:
        """Digest of all that ranks at one place have in common."""
        header, tensors = self.give()
        common = [header[key] for key in ("progress", "steps", "outer")]
        facts = json.dumps(common, sort_keys=True).encode()
        return digest_of([_tensor(facts), *tensors.values()])

    def take(self, connection: socket.socket, header: dict[str, Any]) -> int:
        """Become what another rank gives; nothing changes before every digest is right.

        Returns:
            Bytes that came: all but the pieces that `known` told.

        Raises:
            WireError: a digest is not right, or the other rank trains another model.
        """
        kept, known = self._beside, self._known
        self._beside, self._known, came = {}, {}, 0
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in header["tensors"]:
            tensors[name] = kept.get(name, _empty(dtype, shape))
            came += receive_tensor(connection, tensors[name], name, known.get(name, ()))
        self._check_model(tensors)
        inner, parts = unpack_structure(header["inner"])
        for i, part in enumerate(parts):
            part.copy_(tensors[f"inner {i}"])
        with torch.no_grad():
            for name, p in self._parameters():
                p.copy_(tensors[f"parameter {name}"])
        self.optimizer.load_common_state(inner)
        outer = {n.removeprefix("outer "): t for n, t in tensors.items() if n.startswith("outer ")}
        self._exchange.take(header["outer"], outer)
        shards = {int(n[6:]): bytes(t.numpy()) for n, t in tensors.items() if n[:6] == "shard "}
        self._progress.take(header["progress"], header["notes"], shards)
        self._trainer.join_in(*header["steps"])
        self._session.caller = unpack(pb.Caller, header["caller"])
        with self._pulse.edit() as beat:
            beat.CopyFrom(unpack(pb.HeartbeatRequest, header["beat"]))
        return came

    def _check_model(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self._parameters():
            came = tensors.get(f"parameter {name}")
            if came is None or came.shape != p.shape:
                shape = None if came is None else list(came.shape)
                raise WireError(
                    f"the others train another model: {name} is {shape} there, {list(p.shape)} here"
                )

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self._trainer.model.named_parameters())


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)


def _described(tensors: dict[str, Tensor]) -> list[list[Any]]:
    """Name, dtype and shape of each, as JSON."""
    return [[name, str(t.dtype), list(t.shape)] for name, t in tensors.items()]


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
