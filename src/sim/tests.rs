#![forbid(unsafe_code)]

use super::*;

#[test]
fn the_same_seed_makes_the_same_run() {
    let options = Options { seed: 7, operations: 600, trace: false };
    assert_eq!(run(&options).unwrap(), run(&options).unwrap());
}

#[test]
fn a_few_runs_find_nothing_wrong() {
    for seed in 1..6 {
        let report = run(&Options { seed, operations: 1500, trace: false })
            .unwrap_or_else(|failure| panic!("{failure}"));
        println!("{report:?}");
    }
}
