# The XLA FFI headers come with jaxlib. They are taken from the interpreter that builds, so that headers and runtime
# agree where the package is built in the environment that runs it.
set(script [[
import importlib.metadata, importlib.util, pathlib
package = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
print(package / "include", importlib.metadata.version("jaxlib"), sep=";")
]])
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "${script}"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_VARIABLE error)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "jaxmoe: ${Python_EXECUTABLE} has no jaxlib, whose headers the build needs. "
    "Install it there (pip install 'jaxlib>=0.10.2') or build without --no-build-isolation.\n${error}")
endif()
list(GET found 0 JAXMOE_JAXLIB_INCLUDE)
list(GET found 1 JAXMOE_JAXLIB_VERSION)
message(STATUS "jaxmoe: FFI headers of jaxlib ${JAXMOE_JAXLIB_VERSION}")
