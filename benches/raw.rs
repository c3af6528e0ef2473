//! What a pool costs: a volume against a raw device of the same kind, both through the same target, one reactor.
//!
//! `cargo bench --bench raw -- [rounds=7] [seconds=2] [size=1GiB] [device=ram:SIZE]`. The daemon's reactor has core 0, the
//! initiator core 1. In each round every workload runs on the raw device and on the volume, one after the other.

#[path = "common/mod.rs"]
mod common;
#[path = "../tests/daemon/mod.rs"]
mod daemon;

use std::net::SocketAddr;
use std::time::Duration;

use common::{Aim, Figure, Options};
use rimrock::host::bench::{self, BenchReport, BenchSpec, Workload};
use serde_json::json;

/// What is measured: workload, bytes of an operation, queue depth, and the aim.
const CASES: [(&str, Workload, usize, u16, f64); 4] = [
    ("4 KiB random read, QD 32", Workload::RAND_READ, 4096, 32, 0.90),
    ("4 KiB random overwrite, QD 32", Workload::RAND_WRITE, 4096, 32, 0.80),
    ("1 MiB sequential write, QD 8", Workload::WRITE, 1 << 20, 8, 0.95),
    ("1 MiB sequential read, QD 8", Workload::READ, 1 << 20, 8, 0.95),
];

fn main() {
    let options = Options::read();
    let (rounds, seconds) = (options.number("rounds", 7), options.number("seconds", 2));
    let gib = options.number("gib", 1);
    let port = daemon::free_port();
    println!("volume over raw device, {gib} GiB of ram each, {rounds} rounds of {seconds} s");
    let config = format!("[reactor]\ncores = \"0\"\n[target]\nlisten = \"127.0.0.1:{port}\"\n");
    let daemon = daemon::Daemon::start_with(Some(&config));
    // The pool's device has room for what overwriting holds until the next commit.
    let backing = format!("ram:{}GiB?populate=yes", 2 * gib);
    daemon.call("pool_create", json!({ "name": "bench", "devices": [backing] }));
    daemon.call("volume_create", json!({ "name": "volume", "size": gib << 30 }));
    let exported = daemon.call("volume_export", json!({ "name": "volume" }));
    let volume = exported["nqn"].as_str().expect("an NQN").to_owned();
    daemon.call("device_create", json!({ "name": "raw", "uri": format!("ram:{gib}GiB?populate=yes") }));
    let raw = "nqn.2026-01.bench:raw";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": raw, "allow_any_host": true }));
    daemon.call("nvmf_subsystem_add_ns", json!({ "nqn": raw, "namespace": { "bdev_name": "raw" } }));
    let address = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    daemon.call("nvmf_subsystem_add_listener", json!({ "nqn": raw, "listen_address": address }));

    let measure = |nqn: &str, (_, workload, bytes, depth, _), seed, duration| -> BenchReport {
        let mut spec = BenchSpec::new(SocketAddr::from(([127, 0, 0, 1], port)), nqn);
        spec.workload = workload;
        spec.block_bytes = bytes;
        spec.queue_depth = depth;
        spec.warmup = Duration::from_millis(300);
        spec.duration = duration;
        spec.core = Some(1);
        spec.seed = seed;
        bench::run(spec).expect("the target answers")
    };
    // Both are written from end to end before anything counts.
    for nqn in [raw, &volume] {
        measure(nqn, CASES[2], 0, Duration::from_secs(3));
    }
    let mut figures: [Figure; 4] = Default::default();
    for round in 0..rounds {
        for (case, figure) in CASES.into_iter().zip(&mut figures) {
            let duration = Duration::from_secs(seconds);
            // Whoever comes first changes with the round.
            let (a, b) = if round % 2 == 0 { (raw, volume.as_str()) } else { (volume.as_str(), raw) };
            let (a, b) = (measure(a, case, round + 1, duration), measure(b, case, round + 1, duration));
            let (raw, pool) = if round % 2 == 0 { (a, b) } else { (b, a) };
            println!(
                "  {:32} raw {:8.0} IOPS {:7.0} MiB/s p99 {:6.0} us   volume {:8.0} IOPS {:7.0} MiB/s p99 {:6.0} us",
                case.0,
                raw.total.iops,
                raw.total.mib_per_s,
                raw.total.latency.p99_us,
                pool.total.iops,
                pool.total.mib_per_s,
                pool.total.latency.p99_us
            );
            figure.add(pool.total.iops / raw.total.iops);
        }
    }
    for (case, figure) in CASES.iter().zip(&figures) {
        figure.judge(case.0, Aim::AtLeast(case.4));
    }
}
