//! Runs the simulator of the pool: `rimrock-sim --seed 7 --operations 5000`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    let mut args = std::env::args().skip(1);
    let seed = args.next().and_then(|s| s.parse().ok()).unwrap_or(1);
    let operations = args.next().and_then(|s| s.parse().ok()).unwrap_or(5000);
    match rimrock::sim::run(&rimrock::sim::Options { seed, operations }) {
        Ok(report) => {
            println!("{report:?}");
            std::process::ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            std::process::ExitCode::FAILURE
        }
    }
}
