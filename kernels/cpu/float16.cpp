#include "operators_impl.h"

template struct packmamba::Operators<packmamba::float16>;
