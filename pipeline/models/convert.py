"""The former name of `pipeline.models.convert_rt`, which still imports."""

import sys

from pipeline.models import convert_rt

sys.modules[__name__] = convert_rt
