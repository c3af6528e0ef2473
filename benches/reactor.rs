//! What the reactor itself costs: one turn of its loop, a yield, a spawn, a call from another thread.
//!
//! `cargo bench --bench reactor`

use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

use rimrock::reactor::{
    self, FuturePool, ReactorConfig, ReactorHandle, Reactors, block_on, yield_idle, yield_now,
};

fn main() {
    let reactors = Reactors::start(ReactorConfig::default()).expect("the reactors start");
    let handle = &reactors.handles()[0];
    println!("reactor on core {}", handle.core());
    idle_loop(handle);
    yields(handle);
    spawns(handle);
    pool(handle);
    calls(handle);
    sleeping(handle);
}

fn report(what: &str, elapsed: Duration, count: u64) {
    println!("{what:<48}{:>10.1} ns", elapsed.as_nanos() as f64 / count as f64);
}

/// One task that looks for work and finds none: the cost of a hot, idle turn.
fn idle_loop(handle: &ReactorHandle) {
    const COUNT: u64 = 5_000_000;
    let elapsed = block_on(handle.call(|| async {
        let begin = Instant::now();
        for _ in 0..COUNT {
            yield_idle().await;
        }
        begin.elapsed()
    }));
    report("turn with one yield_idle task", elapsed.expect("the reactor lives"), COUNT);
}

/// Thirty-two tasks that are always ready.
fn yields(handle: &ReactorHandle) {
    const COUNT: u64 = 4_000_000;
    const TASKS: u64 = 32;
    let turn = || async {
        for _ in 0..COUNT / TASKS {
            yield_now().await;
        }
    };
    let elapsed = block_on(handle.call(move || async move {
        let begin = Instant::now();
        (1..TASKS).for_each(|_| reactor::spawn(turn()));
        turn().await;
        begin.elapsed()
    }));
    report("yield_now, 32 tasks, each", elapsed.expect("the reactor lives"), COUNT);
}

fn spawns(handle: &ReactorHandle) {
    const COUNT: u64 = 1_000_000;
    let elapsed = block_on(handle.call(|| async {
        let begin = Instant::now();
        for _ in 0..COUNT / 64 {
            (0..64).for_each(|_| reactor::spawn(async {}));
            yield_now().await;
        }
        begin.elapsed()
    }));
    report("spawn and end of a task", elapsed.expect("the reactor lives"), COUNT);
}

fn pool(handle: &ReactorHandle) {
    const COUNT: u64 = 2_000_000;
    let elapsed = block_on(handle.call(|| async {
        let begin = Instant::now();
        let mut pool = FuturePool::new(32);
        let mut done = 0;
        poll_fn(|cx| {
            while done < COUNT {
                while pool.len() < 32 {
                    pool.start(yield_now());
                }
                if pool.poll_ready(cx).is_none() {
                    return Poll::Pending;
                }
                done += 1;
            }
            Poll::Ready(())
        })
        .await;
        begin.elapsed()
    }));
    report("FuturePool: start, wake, two polls", elapsed.expect("the reactor lives"), COUNT);
}

fn calls(handle: &ReactorHandle) {
    const COUNT: u64 = 50_000;
    let begin = Instant::now();
    for _ in 0..COUNT {
        block_on(handle.call(|| async {})).expect("the reactor lives");
    }
    report("call from another thread and its answer", begin.elapsed(), COUNT);
}

/// What an idle reactor does.
fn sleeping(handle: &ReactorHandle) {
    std::thread::sleep(Duration::from_millis(50));
    let (before, begin) = (handle.stats(), Instant::now());
    std::thread::sleep(Duration::from_millis(500));
    let (after, elapsed) = (handle.stats(), begin.elapsed());
    println!(
        "idle for {elapsed:?}: {} turns, {} sleeps",
        after.loops - before.loops,
        after.sleeps - before.sleeps
    );
}
