"""The sandbox's own worker as an ordinary user, also where the tests run as root."""

import pydantic_monty  # noqa: F401  (nobody may not be able to read it later)

from rapo_lib.sandbox import main
from tests.native_probe import drop_root

if __name__ == "__main__":
    drop_root()
    main()
