#include "processors.h"

#include "system.h"

#if AIOENGINE_LINUX
#include <sched.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <thread>

namespace aioengine {

namespace {

constexpr double NO_QUOTA = std::numeric_limits<double>::infinity();

// Of a group of the second version: "max 100000" or "150000 100000".
double quota_of(const std::string& group) {
    std::ifstream file(group + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return NO_QUOTA;
    char* end = nullptr;
    const double time = std::strtod(quota.c_str(), &end);
    return end != quota.c_str() && time > 0 ? time / period : NO_QUOTA;
}

// Of a group of the first version, whose quota is -1 for none.
double old_quota_of(const std::string& group) {
    double time = 0, period = 0;
    std::ifstream(group + "/cpu.cfs_quota_us") >> time;
    std::ifstream(group + "/cpu.cfs_period_us") >> period;
    return time > 0 && period > 0 ? time / period : NO_QUOTA;
}

// The least of a group's own and of those that it is in.
template <class Quota>
double least_quota(const std::string& root, std::string path, const Quota& quota) {
    double least = quota(root);
    while (!path.empty() && path != "/") {
        least = std::min(least, quota(root + path));
        path.erase(path.find_last_of('/'));
    }
    return least;
}

double quota_of_process(const std::string& groups, const std::string& own) {
    double least = NO_QUOTA;
    std::ifstream file(own);
    // "0::/path", or of the first version "4:cpu,cpuacct:/path".
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string kinds = ',' + line.substr(first + 1, second - first - 1) + ',';
        const std::string path = line.substr(second + 1);
        if (path.empty() || path[0] != '/' || path.find("/..") != std::string::npos) continue;
        if (kinds == ",,") least = std::min(least, least_quota(groups, path, quota_of));
        if (kinds.find(",cpu,") != std::string::npos)
            least = std::min(least, least_quota(groups + "/cpu", path, old_quota_of));
    }
    return least;
}

int64_t processors_of_thread() {
#if AIOENGINE_LINUX
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max<int64_t>(1, std::thread::hardware_concurrency());
}

}  // namespace

int64_t usable_processors(std::string groups, std::string own) {
    const double quota = std::max(1.0, quota_of_process(groups, own));
    const int64_t processors = processors_of_thread();
    return quota < static_cast<double>(processors) ? static_cast<int64_t>(quota) : processors;
}

}  // namespace aioengine
