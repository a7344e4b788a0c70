"""Optimizers and gradient exchange inside one site.

`Scape` is the sparse sync (SCAPE, arXiv 2607.01678), `DenseSync` the dense control around any
torch optimizer, `AdamS` the optimizer that both use (arXiv 2505.16363). All of them offer
`InnerOptimizer`, which is all that a training loop needs.
"""

from loco.inner.adams import AdamS
from loco.inner.base import InnerOptimizer
from loco.inner.dense import DenseSync
from loco.inner.groups import Group
from loco.inner.presets import preset
from loco.inner.scape import Scape
from loco.inner.state import reshard

__all__ = ["AdamS", "DenseSync", "Group", "InnerOptimizer", "Scape", "preset", "reshard"]
