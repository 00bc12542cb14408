"""The dashboards of Grafana, as files: ``python -m k8s.dashboards.files [--check]``.

Grafana of docker-compose.yml reads the folder, and k8s/components/dashboards makes a ConfigMap of each file.
"""

import json
import sys
from pathlib import Path

from k8s.dashboards.gpus import FLEET_BOARD, GPU_BOARD, NODE_BOARD
from k8s.dashboards.health import HEALTH_BOARD, PIPELINE_BOARD
from k8s.dashboards.use import IDLE_BOARD, USAGE_BOARD, WORKLOADS_BOARD
from topics.reference import generate

FOLDER = Path(__file__).parents[1] / "components" / "dashboards"


def files() -> dict[Path, str]:
    """Every file and what is in it."""
    boards = (
        FLEET_BOARD,
        NODE_BOARD,
        GPU_BOARD,
        WORKLOADS_BOARD,
        IDLE_BOARD,
        HEALTH_BOARD,
        USAGE_BOARD,
        PIPELINE_BOARD,
    )
    return {FOLDER / f"{board['uid']}.json": json.dumps(board, indent=1) + "\n" for board in boards}


if __name__ == "__main__":
    sys.exit(generate(files(), "k8s.dashboards.files", sys.argv[1:]))
