"""Models cut into stages."""
from colossal.pipeline.partition import partition_balanced, partition_by_counts, partition_uniform, stage_of_layer
from colossal.pipeline.placement import PipelineStyle, Placement
from colossal.pipeline.schedule import *
from colossal.pipeline.cut import SharedParameter
from colossal.pipeline.stage import Stage
