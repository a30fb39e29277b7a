"""Devices, hosts and clusters as data: datasheets, memory shares, shapes, comparison of hosts."""

from launcher.hardware.cluster_shape import JAX_MEMORY_SHARE as JAX_MEMORY_SHARE
from launcher.hardware.cluster_shape import LOCAL as LOCAL
from launcher.hardware.cluster_shape import NETWORK_SHARE as NETWORK_SHARE
from launcher.hardware.cluster_shape import ClusterShape as ClusterShape
from launcher.hardware.cluster_shape import WorkerInfo as WorkerInfo
from launcher.hardware.cluster_shape import beside_others as beside_others
from launcher.hardware.cluster_shape import gpu_memory_variables as gpu_memory_variables
from launcher.hardware.cluster_shape import is_nominal as is_nominal
from launcher.hardware.cluster_shape import local_shape as local_shape
from launcher.hardware.cluster_shape import memory_share as memory_share
from launcher.hardware.cluster_shape import sheet_rates as sheet_rates
from launcher.hardware.cluster_shape import threads_at_work as threads_at_work
from launcher.hardware.cluster_shape import with_measured as with_measured
from launcher.hardware.datasheets import Datasheet as Datasheet
from launcher.hardware.datasheets import described_sheet as described_sheet
from launcher.hardware.datasheets import find_datasheet as find_datasheet
from launcher.hardware.datasheets import has_bf16 as has_bf16
from launcher.hardware.hosts import HostReport as HostReport
from launcher.hardware.hosts import differing_versions as differing_versions
from launcher.hardware.hosts import shortages as shortages
from launcher.hardware.target_config import target_config as target_config
