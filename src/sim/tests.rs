#![forbid(unsafe_code)]

use super::*;

fn options(seed: u64, operations: u64) -> Options {
    Options { seed, operations, trace: false }
}

/// `SEED=n` runs one world; otherwise some fixed ones and a fresh one.
#[test]
fn runs_at_random_find_nothing_wrong() {
    let seeds = match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => {
            let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            (1..6).chain([fresh.as_nanos() as u64]).collect()
        }
    };
    for seed in seeds {
        println!("SEED={seed}");
        let report = run(&options(seed, 2000)).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(report.operations >= 2000, "{report:?}");
    }
}

#[test]
fn the_same_seed_makes_the_same_run() {
    for seed in 7..10 {
        assert_eq!(run(&options(seed, 1500)).unwrap(), run(&options(seed, 1500)).unwrap());
    }
    assert_ne!(run(&options(7, 300)).unwrap().digest, run(&options(8, 300)).unwrap().digest);
}

#[test]
fn a_power_cut_at_any_step_of_a_short_run_loses_nothing() {
    let report = every_step(&options(3, 40), |_, _| ()).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.cuts > 100, "{report:?}");
}

/// The simulator must find each fault that is put into the pool on purpose.
#[test]
fn every_sabotage_is_found() {
    use crate::pool::sabotage::{self, Sabotage::*};
    // With the seed that finds it, as the pool is now; if it finds it no more, others are tried.
    let all = [
        (SkipFlush, 7),
        (RootFirst, 37),
        (FreeEarly, 18),
        (ForgetReads, 58),
        (SealLate, 1),
        (ForgetHold, 122),
        (ForgetSnapshotFlush, 40),
        (ForgetTrim, 1),
        (TrustRecords, 106),
        (ForgetHole, 1),
        (IgnoreFua, 1),
        (OneCopy, 1),
        (ForgetPin, 1),
        (ForgetZeroes, 1),
    ];
    // `SABOTAGE=Name SEED=n` looks for one alone, from there on.
    let wanted = std::env::var("SABOTAGE").ok();
    let from = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    for (what, first) in all {
        if wanted.as_ref().is_some_and(|wanted| *wanted != format!("{what:?}")) {
            continue;
        }
        let first = from.unwrap_or(first);
        let found = (first..first + 300).find_map(|seed| {
            sabotage::set(Some(what));
            let result = std::panic::catch_unwind(|| run(&options(seed, 2000)));
            sabotage::set(None);
            match result {
                Ok(Ok(_)) => None,
                Ok(Err(failure)) => Some(failure.to_string()),
                Err(_) => Some(format!("seed {seed}: it panicked")),
            }
        });
        println!("{what:?}: {found:?}");
        assert!(found.is_some(), "{what:?} goes unnoticed");
    }
}
