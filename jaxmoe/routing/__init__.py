"""Which experts a token goes to (`router.py`), their load (`stats.py`), and what keeps it even (`balance.py`)."""

from jaxmoe.routing.balance import MoEAux, load_balancing_loss, router_aux, router_z_loss, update_selection_bias
from jaxmoe.routing.router import RouterConfig, Routing, route
from jaxmoe.routing.stats import MoEStats, load_stats

__all__ = [
    "MoEAux",
    "MoEStats",
    "RouterConfig",
    "Routing",
    "load_balancing_loss",
    "load_stats",
    "route",
    "router_aux",
    "router_z_loss",
    "update_selection_bias",
]
