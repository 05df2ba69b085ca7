// The device planner for plans by the band and a block mask; attention modules export one with their variant's range.

#include "common/macros.h"
#include "common/params.h"
#include "planner/device.h"

ATTNLOOM_EXPORT int32_t attnloom_plan_scan_device(const attnloom::PlanParams* params,
                                                  const attnloom::PlanHeader* header) {
  return attnloom::plan_on_device(*params, *header);
}

ATTNLOOM_EXPORT int64_t attnloom_params_bytes() {
  return sizeof(attnloom::PlanHeader) + sizeof(attnloom::PlanParams) + sizeof(attnloom::MergeParams) +
         sizeof(attnloom::AppendParams);
}
