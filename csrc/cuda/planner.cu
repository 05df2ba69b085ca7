// The device planner for plans by the band and a block mask; attention modules export one with their variant's range.

#include "common/macros.h"
#include "common/params.h"
#include "cuda/prepare.h"
#include "planner/device.h"

namespace attnloom {
int32_t prepare_planner() {
  return prepare(device_planner::planner_kernel<device_planner::NoVisible, device_planner::NoHookParams>);
}
}  // namespace attnloom

ATTNLOOM_EXPORT int32_t attnloom_plan_scan_device(const attnloom::PlanParams* params,
                                                  const attnloom::PlanHeader* header) {
  return attnloom::plan_on_device(*params, *header);
}

ATTNLOOM_EXPORT int64_t attnloom_params_bytes() {
  return sizeof(attnloom::PlanHeader) + sizeof(attnloom::PlanParams) + sizeof(attnloom::MergeParams) +
         sizeof(attnloom::AppendParams);
}
