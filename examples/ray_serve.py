"""Two replicas of an engine behind Ray Serve: `serve run --app-dir examples ray_serve:app`."""

from aioengine import demo_model
from aioengine.ray_serve import application

app = application(demo_model(), engines={"num_replicas": 2})
