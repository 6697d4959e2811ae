// Whether this is Linux, for what other POSIX systems lack. AIOENGINE_POSIX_ONLY leaves that out on Linux too, so
// that what the others get can be tried there (tests/kernels/core/).

#pragma once

#if defined(__linux__) && !defined(AIOENGINE_POSIX_ONLY)
#define AIOENGINE_LINUX 1
#else
#define AIOENGINE_LINUX 0
#endif
