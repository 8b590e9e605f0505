"""`python -m rapo_lib.pocket [data|models|trajectories|measure|checksums]`: rebuild data/pocket/."""

from __future__ import annotations

import argparse

from rapo_lib.pocket import build

PARTS = {
    "all": build.build_all,
    "data": build.make_data,
    "models": build.make_models,
    "trajectories": build.make_trajectories,
    "measure": lambda: print(build.measure().to_string(index=False)),
    "checksums": build.write_checksums,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.pocket", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=PARTS)
    PARTS[parser.parse_args().part]()
