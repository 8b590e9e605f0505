"""`python -m rapo_lib.pocket [data|models|trajectories|measure|coverage|checksums]`: rebuild data/pocket/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rapo_lib.pocket import build

PARTS = {
    "all": build.build_all,
    "data": build.make_data,
    "models": build.make_models,
    "trajectories": build.make_trajectories,
    "measure": lambda: print(build.measure().to_string(index=False)),
    "coverage": lambda: print(build.coverage().to_string(index=False)),
    "checksums": build.write_checksums,
}
#: Parts that can be done for some models or teachers alone.
SOME = {
    "models": lambda names: build.make_models(only=names),
    "trajectories": lambda names: build.make_trajectories(teachers=names),
    "measure": lambda names: print(build.measure(models=names).to_string(index=False)),
    "coverage": lambda names: print(build.coverage(teachers=names).to_string(index=False)),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Do one part; `--only` names the models or teachers that it is done for."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.pocket", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=PARTS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"models or teachers; for {', '.join(SOME)}")
    args = parser.parse_args(argv)
    if args.only is None:
        PARTS[args.part]()
    elif args.part in SOME:
        SOME[args.part](args.only)
    else:
        parser.error(f"--only does not go with {args.part}; it goes with {', '.join(SOME)}")


if __name__ == "__main__":
    main()
