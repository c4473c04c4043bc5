"""Ranks of `jaxmoe.bench.beside`. The first one prints each line of the table, and as JSON behind the word "result".

argument 1   fields of `jaxmoe.bench.options.BesideOptions` as JSON; `shape` is a list of the four sizes, `network`
             the fields of a plan
"""

import json
import sys

from tests.multiprocess.rank import join, step


def main() -> None:
    rank = join()
    from jaxmoe.bench import beside
    from jaxmoe.bench.beside_table import line
    from jaxmoe.bench.options import BesideOptions
    from jaxmoe.bench.shapes import LayerShape
    from jaxmoe.network.plan import NetworkPlan

    fields = json.loads(sys.argv[1])
    if "shape" in fields:
        fields["shape"] = LayerShape(*fields["shape"])
    if fields.get("network"):
        fields["network"] = NetworkPlan(**fields["network"])
    fields |= {name: tuple(fields[name]) for name in ("programs", "tokens")}
    for result in beside.measure(BesideOptions(**fields), progress=step):
        step(line(result))
        if rank.index == 0:
            step(f"result {result.to_json()}")


if __name__ == "__main__":
    main()
