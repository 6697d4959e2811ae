// The processors that a process may use.

#pragma once

#include <cstdint>
#include <string>

namespace aioengine {

// Those of the calling thread's affinity, or as many whole ones as the quotas of its control groups allow, if
// that is less: beyond a quota all threads wait for its next period, and what a thread holds waits with it. At
// least one. `groups`: where control groups are, `own`: the file that names this process's.
int64_t usable_processors(std::string groups, std::string own);

}  // namespace aioengine
