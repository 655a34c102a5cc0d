"""One typed tree of every engine option, and the four places its values come from.

Defaults < TOML file < `--set a.b=c` < explicit options. Whatever cannot be honoured is a ConfigError that
names the key, the value, what is allowed and where the value came from.
"""

from paceline.config.checks import OPTION_PATHS
from paceline.config.sources import load_config, to_toml, with_options
from paceline.config.tables import (
    Config,
    Device,
    Dtype,
    GroupsConfig,
    Growth,
    Mode,
    Placement,
    SchedulerConfig,
    Selector,
    SpeculationConfig,
    SuffixCache,
    TreeConfig,
)

__all__ = [
    "OPTION_PATHS",
    "Config",
    "Device",
    "Dtype",
    "GroupsConfig",
    "Growth",
    "Mode",
    "Placement",
    "SchedulerConfig",
    "Selector",
    "SpeculationConfig",
    "SuffixCache",
    "TreeConfig",
    "load_config",
    "to_toml",
    "with_options",
]
