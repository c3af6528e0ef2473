//! The volatile write cache: whom it is shown to, what switching it off means, and how many flushes reach the device.

use super::client::*;

const VOLATILE_WRITE_CACHE: u8 = 0x06;
const FLUSH: u8 = 0x00;
const KIB: usize = 1 << 10;

/// A rig on a file, which has a cache.
fn cached_rig() -> (Rig, tempfile::TempDir) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let rig = Rig::with_device(&format!("uring:{}?size=64MiB", directory.path().join("disk.img").display()));
    (rig, directory)
}

fn device_flushes(rig: &Rig) -> u64 {
    rig.target.subsystem(SUBNQN).unwrap().namespaces[0].flushes
}

/// How many flushes of the device a write of each kind costs: in the capsule, asked for, and of zeros.
fn flushes_of_writes(rig: &Rig, io: &mut Wire) -> [u64; 3] {
    let mut before = device_flushes(rig);
    [0, 1, 2].map(|kind| {
        match kind {
            0 => assert!(io.write(1, 0, &pattern(4 * KIB, 1)).ok()),
            1 => assert!(io.write(1, 8, &pattern(64 * KIB, 2)).ok()),
            _ => assert!(io.command(Sqe::rw(8, 1, 4, 3), &[]).ok()),
        }
        let now = device_flushes(rig);
        now - std::mem::replace(&mut before, now)
    })
}

#[test]
fn a_cache_that_is_switched_off_is_emptied_and_holds_nothing_from_then_on() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    let (mut other_admin, mut other) = rig.connect_as(OTHER_HOST, 32);
    for admin in [&mut admin, &mut other_admin] {
        assert_eq!(admin.identify(1, 0).expect_ok()[525] & 1, 1, "VWC is present");
        assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 1, "WCE is the default");
    }
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    let before = device_flushes(&rig);
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    assert_eq!(device_flushes(&rig) - before, 1, "what was cached is durable");
    assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 0);
    assert_eq!(flushes_of_writes(&rig, &mut io), [1, 1, 1]);
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    assert_eq!(device_flushes(&rig) - before, 4, "it was off already");
    // It is this controller's setting.
    assert_eq!(other_admin.get_feature(VOLATILE_WRITE_CACHE).result, 1);
    assert_eq!(flushes_of_writes(&rig, &mut other), [0, 0, 0]);
    admin.set_feature(VOLATILE_WRITE_CACHE, 1).expect_ok();
    assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 1);
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    // A controller begins anew.
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    drop((admin, io));
    assert_eq!(rig.admin().get_feature(VOLATILE_WRITE_CACHE).result, 1);
    rig.check_health();
}

#[test]
fn a_host_that_never_asked_about_a_cache_has_none() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    assert_eq!(flushes_of_writes(&rig, &mut io), [1, 1, 1]);
    // Told of it, it flushes when it wants to.
    admin.identify(1, 0).expect_ok();
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    let fua = Sqe::rw(1, 1, 0, 0).dword(12, 1 << 30).sgl(IN_CAPSULE, 4096);
    let before = device_flushes(&rig);
    assert!(io.command(fua, &pattern(4096, 3)).ok());
    assert_eq!(device_flushes(&rig) - before, 1, "FUA");
}

#[test]
fn writes_that_run_while_the_cache_is_switched_off_are_answered_when_they_are_durable() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    admin.identify(1, 0).expect_ok();
    for round in 0..20u8 {
        admin.set_feature(VOLATILE_WRITE_CACHE, 1).expect_ok();
        let before = device_flushes(&rig);
        let mut bytes = Vec::new();
        for i in 0..64u16 {
            let sqe = Sqe::rw(1, 1, u64::from(i), 0).sgl(IN_CAPSULE, 4096).cid(i);
            bytes.extend(io.pdu(4, 0, &sqe.0, &pattern(4096, round)));
        }
        io.send(&bytes);
        admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
        for _ in 0..64 {
            assert!(io.complete(&[]).ok());
        }
        let flushes = device_flushes(&rig) - before;
        assert!((1..=65).contains(&flushes), "round {round}: {flushes} flushes");
    }
    rig.check_health();
}

#[test]
fn many_flushes_at_once_are_few_for_the_device() {
    let (rig, _directory) = cached_rig();
    let admin = rig.admin();
    let mut queues = [1, 2].map(|qid| {
        let mut io = rig.wire();
        io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
        io
    });
    for nsid in [1, 0xFFFF_FFFF] {
        let before = device_flushes(&rig);
        for io in &mut queues {
            let flush = |cid| io.pdu(4, 0, &Sqe::new(FLUSH, nsid).cid(cid).0, &[]);
            let bytes: Vec<u8> = (0..100).flat_map(flush).collect();
            io.send(&bytes);
        }
        for io in &mut queues {
            for _ in 0..100 {
                assert!(io.complete(&[]).ok());
            }
        }
        let flushes = device_flushes(&rig) - before;
        assert!((1..=10).contains(&flushes), "{flushes} flushes of the device for 200 of its hosts");
    }
    rig.check_health();
}
