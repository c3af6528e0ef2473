//! The `rimrock` binary: everything is in the library, see `rimrock::cli`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    rimrock::cli::main()
}
