//! What a host does, against any target: each check makes its own controller.

use std::net::SocketAddr;
use std::time::Duration;

use rimrock::host::bench::{self, BenchError, BenchSpec, Workload};
use rimrock::host::blocking::{self, BlockingController, Pdu, RawAssociation, RawConnection, now};
use rimrock::host::{self, ControllerOptions, Data, HostError, Namespace};
use rimrock::memory::{DmaBuf, DmaSlice};
use rimrock::nvme::base::{SglDescriptor, admin, nvm};
use rimrock::nvme::command::ReadWrite;
use rimrock::nvme::features::{AsyncEvent, AsyncEventConfiguration, fid};
use rimrock::nvme::identify::Oncs;
use rimrock::nvme::log::{DiscoveryLogEntry, lid};
use rimrock::nvme::tcp::{Digests, Fes, R2t};
use rimrock::nvme::{Sqe, Status, nqn};
use rimrock::reactor::{self, ReactorConfig, Reactors};
use zerocopy::IntoBytes;

pub const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
pub const MIB: usize = 1 << 20;

/// A target with one namespace of 64 MiB in blocks of 512 bytes, open to every host, that answers discovery at the same
/// address.
pub trait Rig {
    fn addr(&self) -> SocketAddr;

    /// Adds namespace 2: 1024 blocks of 4096 bytes.
    fn add_second_namespace(&mut self);
}

pub fn all(rig: &mut impl Rig) {
    let addr = rig.addr();
    identifies_and_reads_logs(addr);
    moves_data_of_every_size(addr);
    keeps_many_commands_in_flight(addr);
    zeroes_deallocates_and_compares(addr);
    tells_errors_apart(addr);
    speaks_raw(addr);
    hears_of_new_namespaces(rig);
    discovers(addr);
    works_on_a_reactor(addr);
    measures_and_verifies(addr);
}

fn options() -> ControllerOptions {
    ControllerOptions::new(uuid::Uuid::from_u128(0x1234))
}

fn connect(addr: SocketAddr, options: &ControllerOptions) -> (BlockingController, Namespace) {
    let ctrl = blocking::connect(addr, NQN, options).unwrap();
    let ns = now(ctrl.namespace(1)).unwrap();
    (ctrl, ns)
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 7 + (i >> 9)) as u8).collect()
}

fn identifies_and_reads_logs(addr: SocketAddr) {
    let (mut ctrl, ns) = connect(addr, &ControllerOptions { queues: 2, kato_ms: 10_000, ..options() });
    assert_eq!(ctrl.queue_count(), 2);
    assert_eq!(nqn::text_of_field(&ctrl.identify().subnqn), Ok(NQN));
    assert!(ctrl.identify().in_capsule_bytes() >= 4096);
    assert_eq!(now(ctrl.active_namespaces()).unwrap(), [1]);
    assert_eq!((ns.bytes(), ns.block_bytes), (64 * MIB as u64, 512));
    assert!(ns.uuid.is_some());
    let smart = now(ctrl.log_page(lid::SMART, 0xFFFF_FFFF, 0, 512, false)).unwrap();
    assert_eq!(smart.len(), 512);
    now(ctrl.keep_alive()).unwrap();
    assert_eq!(now(ctrl.get_feature(fid::KEEP_ALIVE_TIMER)).unwrap(), 10_000);
    assert!(!now(ctrl.abort(1, 99)).unwrap(), "there is no such command to abort");
    now(ctrl.shutdown()).unwrap();
}

/// In the capsule, by one R2T, by several, and back; with and without digests and with padded data.
fn moves_data_of_every_size(addr: SocketAddr) {
    for (digests, hpda) in [(0, 0), (1, 0), (2, 7), (3, 31)] {
        let (ctrl, ns) = connect(addr, &ControllerOptions { digests: Digests(digests), hpda, ..options() });
        let max = ctrl.transfer_bytes_max();
        assert!(max >= 128 * 1024, "MDTS of {max} bytes");
        for (n, len) in [512, 4096, 4608, 8192, 65536, 128 * 1024, max].into_iter().enumerate() {
            let data = pattern(len, n);
            let slba = (n * 1000) as u64;
            now(ctrl.write(&ns, slba, data.clone(), n % 2 == 0)).unwrap();
            let (result, back) = now(ctrl.read(&ns, slba, vec![0; len]));
            result.unwrap();
            assert!(back == data, "{len} bytes with digests {digests}, HPDA {hpda}");
        }
        now(ctrl.flush(&ns)).unwrap();
    }
}

fn keeps_many_commands_in_flight(addr: SocketAddr) {
    let (ctrl, ns) = connect(addr, &options());
    let queue = &ctrl.io_queues()[0];
    for len in [4096, 64 * 1024] {
        let count = 3 * usize::from(ctrl.depth());
        let slba = |n: usize| (n % 127 * len / 512) as u64;
        let blocks = len as u32 / 512;
        let tickets: Vec<_> = (0..127)
            .map(|n| {
                let sqe = ReadWrite::new(ns.nsid, slba(n), blocks).to_sqe(nvm::WRITE);
                queue.submit(sqe, Data::Out(pattern(len, n))).unwrap()
            })
            .collect();
        for ticket in tickets {
            assert_eq!(queue.wait(ticket).0.unwrap().status(), Status::SUCCESS);
        }
        let tickets: Vec<_> = (0..count)
            .map(|n| {
                let sqe = ReadWrite::new(ns.nsid, slba(n), blocks).to_sqe(nvm::READ);
                queue.submit(sqe, Data::In(vec![0; len])).unwrap()
            })
            .collect();
        for (n, ticket) in tickets.into_iter().enumerate() {
            let (result, data) = queue.wait(ticket);
            assert_eq!(result.unwrap().status(), Status::SUCCESS);
            assert!(matches!(data, Data::In(buf) if buf == pattern(len, n % 127)), "read {n} of {len} bytes");
        }
    }
}

fn zeroes_deallocates_and_compares(addr: SocketAddr) {
    let (ctrl, ns) = connect(addr, &options());
    now(ctrl.write(&ns, 0, pattern(16384, 1), false)).unwrap();
    if Oncs(ctrl.identify().oncs.get()).compare() {
        now(ctrl.compare(&ns, 0, pattern(16384, 1))).unwrap();
        let error = now(ctrl.compare(&ns, 0, pattern(16384, 2))).unwrap_err();
        assert!(error.status().unwrap().is(Status::COMPARE_FAILURE), "{error}");
    }
    now(ctrl.write_zeroes(&ns, 8, 8, false)).unwrap();
    // Deallocate is advice, and SPDK takes it for the first range of a command only.
    now(ctrl.deallocate(&ns, &[(24, 4)])).unwrap();
    now(ctrl.deallocate(&ns, &[(28, 4)])).unwrap();
    let (result, data) = now(ctrl.read(&ns, 0, vec![1; 16384]));
    result.unwrap();
    let mut want = pattern(16384, 1);
    want[4096..8192].fill(0);
    want[12288..].fill(0);
    let wrong = data.iter().zip(&want).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "the first byte that differs");
}

fn tells_errors_apart(addr: SocketAddr) {
    let refused = blocking::connect(addr, "nqn.2016-06.io.spdk:nobody", &options()).err().unwrap();
    assert!(matches!(refused, HostError::ConnectRefused { qid: 0, .. }), "{refused}");
    assert!(refused.status().unwrap().is(Status::CONNECT_INVALID_PARAMETERS), "{refused}");

    let (ctrl, ns) = connect(addr, &options());
    let (result, buf) = now(ctrl.read(&ns, ns.blocks, vec![0; 512]));
    assert!(result.unwrap_err().status().unwrap().is(Status::LBA_OUT_OF_RANGE));
    assert_eq!(buf.len(), 512, "the buffer comes back");
    let (result, _) = now(ctrl.read(&ns, 0, vec![0; 100]));
    assert!(matches!(result, Err(HostError::Invalid { .. })));
    let error = now(ctrl.namespace(77)).unwrap_err();
    assert!(error.status().is_some() || matches!(error, HostError::Invalid { .. }), "{error}");

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(matches!(blocking::connect(nobody, NQN, &options()), Err(HostError::Connect { .. })));
}

fn speaks_raw(addr: SocketAddr) {
    let mut raw = RawConnection::greeted(addr).unwrap();
    assert!(raw.max_h2c_data >= 4096 && raw.max_h2c_data.is_multiple_of(4));
    raw.send(R2t::new(1, 1, 0, 4096).as_bytes()).unwrap();
    let (fes, _) = raw.expect_termination().unwrap();
    assert!(matches!(fes, Fes::SEQUENCE_ERROR | Fes::INVALID_HEADER_FIELD), "{fes}");

    let association = RawAssociation::connect(addr, NQN, &options().hostnqn, [7; 16]).unwrap();
    let mut queue = association.io_queue(addr, 1, 32).unwrap();
    // A write by R2T, step by step.
    let mut sqe = ReadWrite::new(1, 0, 32).to_sqe(nvm::WRITE);
    let cid = queue.new_cid();
    sqe.cid = cid.into();
    sqe.dptr = SglDescriptor::transport(16384);
    queue.send_capsule(sqe, &[]).unwrap();
    let Pdu::R2t(r2t) = queue.next_pdu().unwrap() else { panic!("no R2T") };
    assert_eq!((r2t.cccid.get(), r2t.r2to.get(), r2t.r2tl.get()), (cid, 0, 16384));
    let data = pattern(16384, 5);
    for (n, piece) in data.chunks(4096).enumerate() {
        queue.send_h2c_data(cid, r2t.ttag.get(), n as u32 * 4096, piece, n == 3).unwrap();
    }
    assert_eq!(queue.response_to(cid).unwrap().status(), Status::SUCCESS);
    let (cqe, back) = queue.read_command(ReadWrite::new(1, 0, 32).to_sqe(nvm::READ), 16384).unwrap();
    assert_eq!(cqe.status(), Status::SUCCESS);
    assert!(back == data);
}

fn hears_of_new_namespaces(rig: &mut impl Rig) {
    let (ctrl, _) = connect(rig.addr(), &options());
    let wanted = AsyncEventConfiguration(0).with_namespace_attribute(true);
    now(ctrl.set_feature(fid::ASYNC_EVENT_CONFIGURATION, wanted.0)).unwrap();
    let event = ctrl.admin().submit(Sqe::new(admin::ASYNC_EVENT_REQUEST, 0), Data::None).unwrap();
    rig.add_second_namespace();
    let (result, _) = ctrl.admin().wait(event);
    assert_eq!(AsyncEvent(result.unwrap().dw0.get()), AsyncEvent::NAMESPACE_CHANGED);
    let changed = now(ctrl.log_page(lid::CHANGED_NAMESPACES, 0xFFFF_FFFF, 0, 4096, false)).unwrap();
    assert_eq!(&changed[..8], &[2, 0, 0, 0, 0, 0, 0, 0]);
    let ns = now(ctrl.namespace(2)).unwrap();
    assert_eq!((ns.blocks, ns.block_bytes), (1024, 4096));
    assert_eq!(now(ctrl.active_namespaces()).unwrap(), [1, 2]);
}

fn discovers(addr: SocketAddr) {
    let ctrl = blocking::connect_admin(addr, nqn::DISCOVERY, &options()).unwrap();
    let (_, entries) = now(ctrl.discovery_log()).unwrap();
    let nvm_entry =
        entries.iter().find(|e| nqn::text_of_field(&e.subnqn) == Ok(NQN)).expect("the subsystem is listed");
    assert_eq!(DiscoveryLogEntry::text(&nvm_entry.traddr), "127.0.0.1");
    assert_eq!(DiscoveryLogEntry::text(&nvm_entry.trsvcid), addr.port().to_string());
}

fn works_on_a_reactor(addr: SocketAddr) {
    let config = ReactorConfig { cores: vec![1], ..ReactorConfig::default() };
    let Ok(reactors) = Reactors::start(config) else {
        println!("SKIPPED on a reactor: this machine has no second core");
        return;
    };
    let work = move || async move {
        let options = ControllerOptions { queues: 2, kato_ms: 1000, digests: Digests(2), ..options() };
        let mut ctrl = host::connect(addr, NQN, &options, Duration::from_secs(10)).await.unwrap();
        let ns = ctrl.namespace(1).await.unwrap();
        let len = ctrl.transfer_bytes_max();
        let started = reactor::now();
        let mut round = 0;
        // Longer than the Keep Alive Timeout: the controller would be gone.
        while reactor::now() - started < Duration::from_millis(1500) {
            round += 1;
            let data = DmaSlice::copy_of(&pattern(len, round));
            ctrl.write(&ns, 0, data.clone(), false).await.unwrap();
            let (result, back) = ctrl.read(&ns, 0, DmaBuf::zeroed(len)).await;
            result.unwrap();
            assert!(*back == *data, "round {round}");
            reactor::sleep(Duration::from_millis(50)).await;
        }
        ctrl.flush(&ns).await.unwrap();
        ctrl.shutdown().await.unwrap();
    };
    reactor::block_on(reactors.handles()[0].call(work)).unwrap();
    reactors.shutdown();
}

fn measures_and_verifies(addr: SocketAddr) {
    let short = Duration::from_millis(300);
    let spec = BenchSpec { duration: short, verify: true, queues: 2, ..BenchSpec::new(addr, NQN) };
    // 1 MiB is split by MDTS; 6 KiB is no power of two and crosses into R2T.
    for (workload, block_bytes) in [("randrw:50", 6144), ("rw:30", MIB), ("randwrite", 512)] {
        let workload = workload.parse().unwrap();
        let report = bench::run(BenchSpec { workload, block_bytes, queue_depth: 8, ..spec.clone() }).unwrap();
        assert!(report.writes.operations > 0 && report.total.iops > 0.0, "{report:?}");
        assert!(report.verified_bytes > 0, "what was written has been read back: {report:?}");
        assert_eq!((report.mismatches, report.first_mismatch), (0, None));
        assert_eq!(report.total.operations, report.reads.operations + report.writes.operations);
    }

    // What one run wrote, a later one finds; a block that someone else wrote is reported.
    let range_bytes = Some(64 * 1024);
    let write = BenchSpec { workload: Workload::WRITE, range_bytes, seed: 5, ..spec.clone() };
    bench::run(write).unwrap();
    let read = BenchSpec { workload: Workload::READ, range_bytes, seed: 5, ..spec.clone() };
    assert_eq!(bench::run(read.clone()).unwrap().mismatches, 0);
    let (ctrl, ns) = connect(addr, &options());
    now(ctrl.write(&ns, 3, pattern(512, 1), false)).unwrap();
    let report = bench::run(read).unwrap();
    assert!(report.mismatches > 0);
    assert_eq!(report.first_mismatch.map(|m| m.block), Some(3));

    let odd = BenchSpec { block_bytes: 1000, ..spec };
    assert!(matches!(bench::run(odd), Err(BenchError::Spec { .. })));
}
