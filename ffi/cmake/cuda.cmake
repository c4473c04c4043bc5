# Finds a usable nvcc and enables the CUDA language with it.
#
# Candidates, in this order: JAXMOE_NVCC (CMake option, or the environment variable that pyproject.toml passes on), the
# PyPI wheels of the interpreter that builds, PATH, /usr/local/cuda. A candidate is usable when it compiles and links
# cmake/probe.cu with the flags of the real build; that also catches a wheel without its headers and a host compiler
# that is too new for it. The first usable one wins; JAXMOE_CUDA_MISSING says what stopped each of the others.

set(JAXMOE_CUDA_ARCH "sm_90a")
set(JAXMOE_NVCC_FLAGS
  --generate-code=arch=compute_90a,code=${JAXMOE_CUDA_ARCH}
  # Always errors: spilled registers and arrays in local memory cost a kernel far more than they look like.
  -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error
  -Xcompiler=-Wall,-Wextra)
if(JAXMOE_WARNINGS_AS_ERRORS)
  list(APPEND JAXMOE_NVCC_FLAGS --Werror=all-warnings -Xcompiler=-Werror)
endif()
if(NOT JAXMOE_TIMELINE MATCHES "^(on|off)$")
  message(FATAL_ERROR "jaxmoe: JAXMOE_TIMELINE=${JAXMOE_TIMELINE}. It can be on or off.")
elseif(JAXMOE_TIMELINE STREQUAL "on")
  list(APPEND JAXMOE_NVCC_FLAGS -DJAXMOE_TIMELINE)
endif()
list(JOIN JAXMOE_NVCC_FLAGS " " JAXMOE_NVCC_FLAGS_TEXT)
string(PREPEND JAXMOE_NVCC_FLAGS_TEXT "-std=c++20 -O3 ")

# The wheels have lib/ and no lib64/, which is where their nvcc looks; a toolkit has both or lib64/ alone.
function(jaxmoe_toolkit_library_flag nvcc result)
  get_filename_component(root "${nvcc}" REALPATH)
  get_filename_component(root "${root}" DIRECTORY)
  get_filename_component(root "${root}" DIRECTORY)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS "${root}/lib/libcudart_static.a")
    set(${result} "-L${root}/lib" PARENT_SCOPE)
  endif()
endfunction()

# Sets <result> to the toolkit's version, or to "" and <problem> to the first line of what nvcc had to say.
function(jaxmoe_try_nvcc nvcc result problem)
  set(${result} "" PARENT_SCOPE)
  jaxmoe_toolkit_library_flag("${nvcc}" library_flag)
  separate_arguments(flags UNIX_COMMAND "${JAXMOE_NVCC_FLAGS_TEXT}")
  execute_process(
    COMMAND "${nvcc}" ${flags} -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=-fPIC -cudart static -shared ${library_flag}
      ${CMAKE_CURRENT_SOURCE_DIR}/cmake/probe.cu -o ${CMAKE_CURRENT_BINARY_DIR}/probe.so
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE output)
    string(REGEX MATCH "V([0-9.]+)" ignored "${output}")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  else()
    string(REGEX MATCH "[^\n]*(error|fatal|cannot|[Nn]o such)[^\n]*" line "${output} ${status}")
    set(${problem} "${line}" PARENT_SCOPE)
  endif()
endfunction()

function(jaxmoe_nvcc_candidates result)
  if(JAXMOE_NVCC)
    set(${result} "${JAXMOE_NVCC}" PARENT_SCOPE)   # what was asked for is used or reported, never replaced
    return()
  endif()
  set(script [[
import importlib.util
wheels = importlib.util.find_spec("nvidia.cu13")
print(*(f"{folder}/bin/nvcc" for folder in wheels.submodule_search_locations), sep=";")
]])
  # Fails, and prints nothing, where the wheels are not installed.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "${script}"
    OUTPUT_VARIABLE candidates OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_program(on_path nvcc NO_CACHE NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH)
  if(on_path)
    list(APPEND candidates "${on_path}")
  endif()
  list(APPEND candidates /usr/local/cuda/bin/nvcc)
  set(existing "")
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}")
      list(APPEND existing "${candidate}")
    endif()
  endforeach()
  set(${result} "${existing}" PARENT_SCOPE)
endfunction()

set(JAXMOE_NVCC_FOUND "")
set(JAXMOE_NVCC_VERSION "")
set(JAXMOE_CUDA_MISSING "")
string(TOLOWER "${JAXMOE_CUDA}" jaxmoe_cuda_mode)
if(NOT jaxmoe_cuda_mode MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "jaxmoe: JAXMOE_CUDA=${JAXMOE_CUDA}. It can be auto, on or off.")
endif()

if(jaxmoe_cuda_mode STREQUAL "off")
  set(JAXMOE_CUDA_MISSING "it was switched off (JAXMOE_CUDA=off)")
else()
  jaxmoe_nvcc_candidates(candidates)
  foreach(candidate IN LISTS candidates)
    jaxmoe_try_nvcc("${candidate}" JAXMOE_NVCC_VERSION problem)
    if(JAXMOE_NVCC_VERSION)
      set(JAXMOE_NVCC_FOUND "${candidate}")
      set(JAXMOE_CUDA_MISSING "")
      break()
    endif()
    string(APPEND JAXMOE_CUDA_MISSING "${candidate} cannot be used: ${problem}; ")
  endforeach()
  if(NOT JAXMOE_NVCC_FOUND)
    string(REGEX REPLACE "; $" "" JAXMOE_CUDA_MISSING "${JAXMOE_CUDA_MISSING}")
    if(JAXMOE_CUDA_MISSING STREQUAL "")
      set(JAXMOE_CUDA_MISSING "no nvcc was found in the interpreter's packages, on PATH or in /usr/local/cuda")
    endif()
    if(jaxmoe_cuda_mode STREQUAL "on")
      message(FATAL_ERROR "jaxmoe: JAXMOE_CUDA=on, but ${JAXMOE_CUDA_MISSING}.")
    endif()
  endif()
endif()

if(JAXMOE_NVCC_FOUND)
  message(STATUS "jaxmoe: CUDA part built by ${JAXMOE_NVCC_FOUND} (${JAXMOE_NVCC_VERSION}) for ${JAXMOE_CUDA_ARCH}")
  jaxmoe_toolkit_library_flag("${JAXMOE_NVCC_FOUND}" CMAKE_CUDA_FLAGS)
  set(CMAKE_CUDA_COMPILER "${JAXMOE_NVCC_FOUND}")
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  set(CMAKE_CUDA_ARCHITECTURES OFF)   # JAXMOE_NVCC_FLAGS names the one architecture
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)
else()
  message(STATUS "jaxmoe: CUDA part not built: ${JAXMOE_CUDA_MISSING}")
endif()
