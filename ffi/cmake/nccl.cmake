# Finds NCCL's headers: those of the package nvidia-nccl-cu13 in the interpreter that builds. They are needed for groups
# of several GPUs; without them the CUDA part is built for groups of one (cuda/nccl.h). The library itself is looked up
# at run time: it is the one that XLA has loaded.
set(script [[
import importlib.metadata, importlib.util, pathlib
for folder in importlib.util.find_spec("nvidia.nccl").submodule_search_locations:
    include = pathlib.Path(folder) / "include"
    if (include / "nccl_device.h").exists():
        print(include, importlib.metadata.version("nvidia-nccl-cu13"), sep=";")
        break
]])
# Fails, and prints nothing, where the package is not installed.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "${script}"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(JAXMOE_NCCL_INCLUDE "")
set(JAXMOE_NCCL_VERSION "")
if(found)
  list(GET found 0 JAXMOE_NCCL_INCLUDE)
  list(GET found 1 JAXMOE_NCCL_VERSION)
  message(STATUS "jaxmoe: NCCL headers of nvidia-nccl-cu13 ${JAXMOE_NCCL_VERSION}")
elseif(JAXMOE_NVCC_FOUND)
  message(STATUS "jaxmoe: no NCCL headers (nvidia-nccl-cu13>=2.28), so experts on one GPU only")
endif()
