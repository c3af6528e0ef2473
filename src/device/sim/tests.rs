#![forbid(unsafe_code)]

use super::*;
use crate::reactor::SimReactors;

fn disks(write_cache: bool) -> SimDisks {
    SimDisks::new(5, vec![SimSpec { size: 1 << 20, write_cache, latency: true, slow_reads: false }])
}

fn content(value: u8) -> DmaSlice {
    let mut buf = DmaBuf::zeroed(2 * BLOCK);
    buf.fill(value);
    buf.freeze()
}

/// Runs `task` until it ends or nothing moves any more.
fn run(seed: u64, task: impl Future<Output = ()> + 'static) {
    let mut reactors = SimReactors::new(1, seed);
    reactors.spawn(0, task);
    while reactors.step(|count| count - 1) || reactors.advance() {}
}

#[test]
fn what_was_flushed_stays_and_the_rest_is_kept_lost_or_torn() {
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..200 {
        let disks = SimDisks::new(
            seed,
            vec![SimSpec { size: 1 << 20, write_cache: true, latency: true, slow_reads: false }],
        );
        let device = disks.open().remove(0);
        run(seed, async move {
            device.write(0, content(1)).await.unwrap();
            device.flush().await.unwrap();
            device.write(0, content(2)).await.unwrap();
            device.write(8 << 10, content(3)).await.unwrap();
        });
        disks.power_cycle();
        let bytes = disks.block(0, 0);
        assert!(bytes.iter().all(|byte| [1, 2].contains(byte)), "what was flushed is gone");
        match (bytes.contains(&1), bytes.contains(&2)) {
            (true, true) => torn += 1,
            (true, false) => lost += 1,
            _ => kept += 1,
        }
    }
    assert!(kept > 40 && lost > 40 && torn > 10, "{kept} {lost} {torn}");
}

#[test]
fn without_a_cache_what_was_acknowledged_stays() {
    let disks = disks(false);
    let device = disks.open().remove(0);
    run(1, async move {
        device.write(0, content(1)).await.unwrap();
    });
    disks.power_cycle();
    assert_eq!(disks.block(0, 1), vec![1; BLOCK]);
}

#[test]
fn nothing_completes_after_the_cut() {
    let disks = disks(true);
    let device = disks.open().remove(0);
    disks.cut_after(Some(2));
    run(1, async move {
        device.write(0, content(1)).await.unwrap();
        device.write(0, content(2)).await.unwrap();
        unreachable!("the power is gone");
    });
    assert!(disks.is_cut());
    assert_eq!(disks.operations(), 2);
}
