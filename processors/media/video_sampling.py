"""Choice of the frames of a video that the model is given.

For the same number of frames, or rate, these are the frames that transformers takes
(`default_sample_indices_fn`): frame `i * total // wanted`, for each i below `wanted`. Where it
refuses a video that has fewer frames than are wanted, all are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioengine.config import MediaConfig
from aioengine.errors import MediaError, is_int, is_real
from aioengine.processors.media.video_container import VideoError

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """Number of frames taken, or of each second, which wins.

    `is_asked`: by the caller, not by the configuration.
    """

    num_frames: int | None
    fps: float | None
    is_asked: bool

    @classmethod
    def of(
        cls, num_frames: int | None, fps: float | None, config: MediaConfig, parameter: str
    ) -> Sampling:
        """The caller's wish, or, if there is none, the configuration's. Raises MediaError."""
        rule = ""
        if num_frames is not None and not (is_int(num_frames) and num_frames > 0):
            rule = "num_frames must be a positive integer"
        elif fps is not None and not (is_real(fps) and fps > 0):
            rule = "fps must be a positive number of frames a second"
        if rule:
            raise MediaError(f"{parameter} cannot be sampled: {rule}", parameter=parameter)
        if num_frames is None and fps is None:
            return cls(config.video_num_frames, config.video_fps, False)
        return cls(num_frames, fps, True)

    def indices(self, total: int, source_fps: float | None, limit: int) -> tuple[int, ...]:
        """The frames to take of `total`, ascending. Raises VideoError if they are over `limit`.

        Without any wish, all are taken, or `limit` of them at equal distances. A wish for a rate
        needs the video's own: where it is not known, the number of frames decides; without one, the
        caller's wish is refused, and the configuration's is none.
        """
        if total < 1:
            raise VideoError("it has no frames", value=total)
        wanted = self.num_frames
        if self.fps is not None and source_fps is not None:
            # In this order, and in floating point, as transformers has it.
            wanted = max(1, int(min(total, total / source_fps * self.fps)))
        elif self.fps is not None and self.is_asked and wanted is None:
            raise VideoError("its frames have no known rate, which fps needs; give num_frames")
        taken = min(total, limit if wanted is None else wanted)
        if taken > limit:
            raise VideoError(
                f"{taken} frames of it are more than media.max_video_frames ({limit}); take fewer "
                "with num_frames or fps",
                value=taken,
            )
        return tuple(index * total // taken for index in range(taken))
