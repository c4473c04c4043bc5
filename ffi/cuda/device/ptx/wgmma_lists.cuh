// The registers of accumulators as PTX takes them, one by one: their names in an instruction, and the operands behind
// it, elements of an array `d`. For wgmma.cuh and wgmma_registers.cuh.
#pragma once

#define JAXMOE_EIGHT(first)                                                                                    \
  "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3]), "+f"(d[first + 4]),              \
      "+f"(d[first + 5]), "+f"(d[first + 6]), "+f"(d[first + 7])

// 64 of them, which are the first operands.
#define JAXMOE_64_NAMES                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define JAXMOE_64_SUMS(first)                                                                              \
  JAXMOE_EIGHT(first), JAXMOE_EIGHT(first + 8), JAXMOE_EIGHT(first + 16), JAXMOE_EIGHT(first + 24),        \
      JAXMOE_EIGHT(first + 32), JAXMOE_EIGHT(first + 40), JAXMOE_EIGHT(first + 48), JAXMOE_EIGHT(first + 56)
