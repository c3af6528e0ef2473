#![forbid(unsafe_code)]

use super::report::Tally;
use super::*;

#[test]
fn workloads_have_names() {
    for (text, read_percent, is_random) in [
        ("read", 100, false),
        ("write", 0, false),
        ("randread", 100, true),
        ("randwrite", 0, true),
        ("rw:50", 50, false),
        ("randrw:70", 70, true),
    ] {
        let workload: Workload = text.parse().unwrap();
        assert_eq!(workload, Workload { read_percent, is_random }, "{text}");
        assert_eq!(workload.to_string(), text);
    }
    assert_eq!("rw".parse(), Ok(Workload { read_percent: 50, is_random: false }));
    for text in ["", "trim", "randrw:101", "randrw:x", "read:50", "randrw:"] {
        let error = text.parse::<Workload>().unwrap_err();
        assert!(error.to_string().contains("randread"), "the error names what there is: {error}");
    }
}

#[test]
fn tallies_add_up() {
    let (mut reads, mut writes) = (Tally::new(), Tally::new());
    for us in 1..=1000 {
        reads.record(Duration::from_micros(us), 4096);
    }
    writes.record(Duration::from_secs(1000), 4096);
    let report = reads.report(2.0);
    assert_eq!((report.operations, report.bytes, report.iops), (1000, 4_096_000, 500.0));
    assert!((report.mib_per_s - 1.953).abs() < 0.001);
    assert!((report.latency.p50_us - 500.0).abs() < 1.0 && (report.latency.p99_us - 990.0).abs() < 1.0);
    let total = reads.merged(&writes).report(2.0);
    assert_eq!(total.operations, 1001);
    assert!(total.latency.max_us >= 59.0e6, "what takes too long is counted as the longest");
    assert_eq!(Tally::new().report(1.0), OperationReport::default());
}
