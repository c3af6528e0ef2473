//! Runs the simulator of the pool: crashes at random, or at every step in turn, and says with which seed it found
//! something wrong.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use rimrock::sim::{Failure, Options, Report, every_step, run};

/// The pool under a simulated clock, on simulated disks that lose, tear and reorder what was not flushed.
///
/// Exit code 0: nothing wrong was found. 1: something was; the report names the seed, with which it happens again.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  rimrock-sim --seed 7 --operations 5000\n  rimrock-sim --seed 1 --seeds 200 --operations 5000\n  rimrock-sim --every-step --operations 60\n  rimrock-sim --forever"
)]
struct Arguments {
    /// The first seed; from the clock when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// How many seeds to run, one after the other from the first.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Operations of one run: reads, writes, trims, flushes, snapshots, clones, rollbacks, deletions …
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    operations: u64,
    /// Run the same short run again and again, with the power cut at each operation of a device in turn.
    #[arg(long)]
    every_step: bool,
    /// Go on until something is found.
    #[arg(long)]
    forever: bool,
    /// Threads, each with seeds of its own.
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, |count| count.get() as u64))]
    jobs: u64,
    /// Print what is done to the tree of snapshots.
    #[arg(long)]
    trace: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.trace {
        tracing_subscriber::fmt().without_time().init();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let first = arguments.seed.unwrap_or(now % 1_000_000_000);
    let count = if arguments.forever { u64::MAX } else { arguments.seeds };
    println!("seeds from {first}, {} operations each", arguments.operations);
    let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.min(count).max(1) {
            scope.spawn(|| {
                while !failed.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= count {
                        return;
                    }
                    let Some(seed) = first.checked_add(at) else { return };
                    match one(&arguments, seed) {
                        Ok(report) => tell(seed, &report),
                        Err(failure) => {
                            failed.store(true, Ordering::Relaxed);
                            eprintln!("{failure}");
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    let outcome = if failed { "a fault was found" } else { "nothing was found" };
    println!("{outcome}, {:.1} s", started.elapsed().as_secs_f64());
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn one(arguments: &Arguments, seed: u64) -> Result<Report, Failure> {
    let options = Options { seed, operations: arguments.operations, trace: arguments.trace };
    // A panic of the pool is as good a find as any; its text is on stderr already.
    let caught = std::panic::catch_unwind(|| match arguments.every_step {
        true => every_step(&options, |_, _| ()),
        false => run(&options),
    });
    caught.unwrap_or_else(|_| Err(Failure { seed, life: 0, step: None, text: "it panicked".into() }))
}

fn tell(seed: u64, report: &Report) {
    println!(
        "seed {seed}: {} operations in {} lives, {} power cuts, {} operations of devices, {:.1} s simulated, digest {:016x}",
        report.operations,
        report.lives,
        report.cuts,
        report.device_operations,
        report.time.as_secs_f64(),
        report.digest
    );
}
