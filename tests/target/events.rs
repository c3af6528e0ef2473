//! Namespaces that come, go and grow while hosts work: who is concerned hears of it at once, and nobody else notices.

use std::sync::atomic::{AtomicBool, Ordering};

use rimrock::device::{Device, OpenOptions};
use rimrock::pool::{PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const INVALID_NAMESPACE: u16 = 0x00B;
const NAMESPACE_EVENT: u64 = 0x0004_0002;
const MIB: u64 = 1 << 20;

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn ram() -> NamespaceSpec {
    NamespaceSpec::new(Backend::Device(Device::open("ram:8MiB", OpenOptions::default()).unwrap()), "ram")
}

/// Waits for the event and gives the list of what has changed.
fn changed(admin: &mut Wire) -> Vec<u32> {
    assert_eq!(admin.complete(&[]).result, NAMESPACE_EVENT);
    admin.submit(Sqe::new(0x0C, 0), &[]);
    let page = admin.log_page(4, 0, 4096, false).expect_ok();
    page.chunks(4).map(|nsid| le(nsid) as u32).take_while(|&nsid| nsid != 0).collect()
}

fn listen_for_events(admin: &mut Wire) {
    admin.set_feature(0x0B, 0x100).expect_ok();
    admin.submit(Sqe::new(0x0C, 0), &[]);
}

#[test]
fn namespaces_come_and_go_under_load_and_their_neighbours_do_not_notice() {
    let rig = Rig::start();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = |host: &'static str, nsid: u32, first: u64, may_be_away: bool| {
            let (rig, stop) = (&rig, &stop);
            scope.spawn(move || {
                let (_admin, mut io) = rig.connect_as(host, 32);
                let (mut seed, mut done) = (0u8, 0u32);
                while !stop.load(Ordering::Relaxed) {
                    seed = seed.wrapping_add(1);
                    // Small in the capsule, large by request: both ways must end.
                    let data = pattern(if seed % 2 == 0 { 8192 } else { 64 << 10 }, seed);
                    let written = io.write(nsid, first, &data);
                    let read = io.read(nsid, first, data.len() as u32);
                    if may_be_away {
                        assert!(
                            [written.code(), read.code()]
                                .iter()
                                .all(|code| [0, INVALID_NAMESPACE].contains(code))
                        );
                    } else {
                        assert!(written.ok() && read.expect_ok() == data, "namespace {nsid} is disturbed");
                    }
                    done += 1;
                }
                done
            })
        };
        let steady = [work(HOSTNQN, 1, 0, false), work(OTHER_HOST, 1, 512, false)];
        let unsteady = work(HOSTNQN, 2, 0, true);
        let mut watcher = rig.admin();
        listen_for_events(&mut watcher);
        for _ in 0..200 {
            assert_eq!(rig.target.add_namespace(SUBNQN, ram()).unwrap(), 2);
            assert_eq!(changed(&mut watcher), [2]);
            rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 2).await });
            assert_eq!(changed(&mut watcher), [2]);
        }
        stop.store(true, Ordering::Relaxed);
        for worker in steady {
            assert!(worker.join().unwrap() > 100, "it went on all the time");
        }
        unsteady.join().unwrap();
    });
    rig.check_health();
}

#[test]
fn a_volume_that_grows_under_load_is_told_of_at_once_and_written_to_its_end() {
    let rig = Rig::start();
    let manager = PoolManager::new(rig.reactors(), 64 << 20);
    let device = Device::open("ram:256MiB", OpenOptions::default()).unwrap();
    let (pool, volume) = block_on(async move {
        let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
        let spec =
            VolumeSpec { name: "v".into(), size: MIB, block_size: 4096, write_cache: true, uuid: None };
        pool.volume_create(spec).await.unwrap();
        let volume = pool.open("v").await.unwrap();
        (pool, volume)
    });
    let uuid = volume.uuid();
    rig.target.add_namespace(SUBNQN, NamespaceSpec::new(Backend::Volume(volume), "pool/v")).unwrap();
    let (mut admin, mut io) = rig.connect();
    listen_for_events(&mut admin);
    for mib in 2..20u64 {
        let last = (mib - 1) * 256;
        // What lies beyond is refused up to the moment it is there.
        io.read(2, last, 4096).expect_refused(0x080);
        let waiting: Vec<u16> = (0..16)
            .map(|i| io.submit(Sqe::rw(1, 2, i * 16, 1).sgl(IN_CAPSULE, 8192), &pattern(8192, i as u8)))
            .collect();
        let pool = pool.clone();
        block_on(async move { pool.resize("v", mib * MIB, false).await }).unwrap();
        assert_eq!(rig.target.namespace_resized(uuid), 1);
        assert_eq!(changed(&mut admin), [2]);
        assert_eq!(le(&admin.identify(0, 2).expect_ok()[..8]), mib * 256, "NSZE");
        for _ in &waiting {
            assert!(io.complete(&[]).ok());
        }
        let data = pattern(4096, mib as u8);
        assert!(io.write(2, last + 255, &data).ok());
        assert_eq!(io.read(2, last + 255, 4096).expect_ok(), data);
    }
    rig.check_health();
}
