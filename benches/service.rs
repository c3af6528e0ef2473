//! What an operator waits for: the start of a daemon with a pool, its snapshots, clones and rollbacks as a client of the
//! control socket sees them, with much and with little written; and what a daemon costs that has nothing to do.
//!
//! `cargo bench --bench service -- [DIRECTORY] [GiB]`; a pool's file of twice that size is made there, and removed.

#[path = "../tests/daemon/mod.rs"]
mod daemon;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use daemon::Daemon;
use nix::sys::signal::Signal;
use rimrock::host::bench::{self, BenchSpec, Workload};
use serde_json::json;

const REPEATS: usize = 15;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let directory = arguments.next().map_or_else(daemon::scratch, Into::into);
    let gib: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(8);
    let directory = tempfile::Builder::new().prefix("service").tempdir_in(directory).expect("a directory");
    let port = daemon::free_port();
    let uri = format!("uring:{}/pool.img?size={}GiB", directory.path().display(), 2 * gib);
    let config = format!(
        "[reactor]\ncores = \"0\"\n[target]\nlisten = \"127.0.0.1:{port}\"\n[[pool]]\nname = \"bench\"\ndevices = [\"{uri}\"]\ncreate = true\n"
    );
    let mut daemon = Daemon::start_with(Some(&config));
    for (name, written) in [("little", 16 << 20), ("much", gib << 30)] {
        daemon.call("volume_create", json!({ "name": name, "size": gib << 30 }));
        let exported = daemon.call("volume_export", json!({ "name": name }));
        fill(SocketAddr::from(([127, 0, 0, 1], port)), exported["nqn"].as_str().expect("an NQN"), written);
        operations(&daemon, name, written);
    }
    start(&mut daemon, "after a clean stop", Signal::SIGTERM);
    start(&mut daemon, "after kill -9", Signal::SIGKILL);
    idle(&daemon);
}

/// Writes that much, from the beginning.
fn fill(address: SocketAddr, nqn: &str, bytes: u64) {
    let mut spec = BenchSpec::new(address, nqn);
    spec.workload = Workload::WRITE;
    spec.block_bytes = 1 << 20;
    spec.queue_depth = 8;
    spec.warmup = Duration::ZERO;
    spec.duration = Duration::from_secs(1);
    spec.range_bytes = Some(bytes);
    let mut written = 0;
    while written < bytes {
        // Each run begins at the first byte: what is written must fit one.
        written = bench::run(spec.clone()).expect("the target answers").total.bytes;
        spec.duration *= 2;
    }
}

fn operations(daemon: &Daemon, volume: &str, written: u64) {
    let mut times: [Vec<Duration>; 3] = Default::default();
    let mut client = daemon.client();
    for round in 0..REPEATS {
        let (snapshot, clone) = (format!("{volume}-s{round}"), format!("{volume}-c{round}"));
        let calls = [
            ("snapshot_create", json!({ "volume": volume, "name": snapshot })),
            ("clone_create", json!({ "snapshot": snapshot, "name": clone })),
            ("volume_rollback", json!({ "name": volume, "snapshot": snapshot })),
        ];
        for ((method, params), times) in calls.into_iter().zip(&mut times) {
            let started = Instant::now();
            let answer = client.call(method, params);
            times.push(started.elapsed());
            assert!(answer["error"].is_null(), "{method}: {answer}");
        }
    }
    for (name, times) in ["snapshot", "clone", "rollback"].iter().zip(&mut times) {
        times.sort();
        println!(
            "{name:9} with {:6} MiB written: median {:5.2} ms, slowest of {REPEATS} {:5.2} ms",
            written >> 20,
            times[REPEATS / 2].as_secs_f64() * 1e3,
            times[REPEATS - 1].as_secs_f64() * 1e3,
        );
    }
}

fn start(daemon: &mut Daemon, name: &str, signal: Signal) {
    daemon.signal(signal);
    let started = Instant::now();
    daemon.restart();
    let answered = started.elapsed();
    let pools = daemon.call("pool_list", json!({}));
    println!(
        "start {name}: first answer after {:.0} ms, with {} pool",
        answered.as_secs_f64() * 1e3,
        pools.as_array().map_or(0, Vec::len)
    );
}

fn idle(daemon: &Daemon) {
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).expect("the daemon lives");
        let fields: Vec<&str> = stat.rsplit(") ").next().expect("a line").split(' ').collect();
        fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime")
    };
    std::thread::sleep(Duration::from_secs(2));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(10));
    println!("idle daemon: {:.1} % of a core", (ticks() - before) as f64 / 10.0);
}
