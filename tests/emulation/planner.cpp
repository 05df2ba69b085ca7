// The device planner on fibres. It is one CTA, so what its threads share is one variable.
#include <cuda_runtime.h>

#undef __shared__
#define __shared__ static
#include "common/macros.h"
#include "planner/device.h"

ATTNLOOM_EXPORT int32_t run_planner(const attnloom::PlanParams* params, const attnloom::PlanHeader* header) {
  return attnloom::plan_on_device(*params, *header);
}
