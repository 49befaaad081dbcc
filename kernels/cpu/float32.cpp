#include "operators_impl.h"

template struct packmamba::Operators<float>;
