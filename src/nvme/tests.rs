//! Golden bytes: each PDU and command against bytes written out by hand from the specification's figures.
#![forbid(unsafe_code)]

use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::base::{Cqe, DataDirection, NSID_ALL, SglDescriptor, SglKind, Sqe, admin, nvm};
use super::command::{
    Abort, DatasetManagement, DsmAttributes, DsmRange, Features, GetLogPage, Identify, ReadWrite,
};
use super::fabrics::{
    Cap, Cc, ConnectAttributes, ConnectCommand, ConnectData, ConnectRefusal, ConnectResult, Csts,
    PropertyCommand, Version, property,
};
use super::features::{AsyncEvent, NumberOfQueues, event_type};
use super::identify::{self, IdentifyController, IdentifyNamespace, LbaFormat, nidt};
use super::log::{DiscoveryLogEntry, SmartLog, U128};
use super::status::Status;
use super::tcp::*;

/// Hexadecimal text to bytes; spaces are free, `..N` stands for N zero bytes.
fn hex(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        if let Some(zeros) = word.strip_prefix("..") {
            out.resize(out.len() + zeros.parse::<usize>().unwrap(), 0);
        } else {
            out.extend((0..word.len()).step_by(2).map(|i| u8::from_str_radix(&word[i..i + 2], 16).unwrap()));
        }
    }
    out
}

#[track_caller]
fn golden<T: IntoBytes + FromBytes + PartialEq + std::fmt::Debug + zerocopy::Immutable>(
    value: T,
    text: &str,
) {
    let bytes = hex(text);
    assert_eq!(value.as_bytes(), &bytes[..]);
    assert_eq!(T::read_from_bytes(&bytes).ok().as_ref(), Some(&value));
}

#[test]
fn initialize_connection_pdus() {
    golden(IcReq::new(3, Digests(0).with_header(true), 16), "00 00 80 00 80000000 0000 03 01 0f000000 ..112");
    golden(
        IcResp::new(0, Digests(0).with_header(true).with_data(true), 0x0002_0000),
        "01 00 80 00 80000000 0000 00 03 00000200 ..112",
    );
}

#[test]
fn term_req_carries_its_information_unaligned() {
    golden(
        TermReq::new(pdu::C2H_TERM_REQ, Fes::INVALID_HEADER_FIELD, 0x0102_0304, 72),
        "03 00 18 00 60000000 0100 04030201 ..10",
    );
    assert_eq!(TermReq::new(pdu::H2C_TERM_REQ, Fes::LIMIT_EXCEEDED, 0, 5000).ch.plen.get(), 152);
    assert_eq!(Fes(9).to_string(), "unknown fatal error status 0x0009");
}

#[test]
fn data_pdus_and_r2t() {
    golden(
        R2t::new(0x1122, 0x3344, 0x2000, 0x1_0000),
        "09 00 18 00 18000000 2211 4433 00200000 00000100 ..4",
    );

    let shape = PduShape::new(24, 4096, Digests(0), 0);
    let mut ch = CommonHeader::bare(pdu::H2C_DATA, 24);
    ch.flags = flags::LAST_PDU;
    shape.apply(&mut ch);
    golden(
        H2cData {
            ch,
            cccid: 7.into(),
            ttag: 9.into(),
            datao: 4096.into(),
            datal: 4096.into(),
            rsvd20: [0; 4],
        },
        "06 04 18 18 18100000 0700 0900 00100000 00100000 ..4",
    );

    let shape = PduShape::new(24, 512, Digests(3), 0);
    let mut ch = CommonHeader::bare(pdu::C2H_DATA, 24);
    ch.flags = flags::LAST_PDU | flags::SUCCESS;
    shape.apply(&mut ch);
    golden(
        C2hData { ch, cccid: 7.into(), rsvd10: [0; 2], datao: 0.into(), datal: 512.into(), rsvd20: [0; 4] },
        "07 0f 18 1c 20020000 0700 0000 00000000 00020000 ..4",
    );
}

#[test]
fn shape_pads_data_and_leaves_empty_pdus_bare() {
    assert_eq!(PduShape::new(72, 8192, Digests(0), 0), PduShape { pdo: 72, plen: 8264, flags: 0 });
    assert_eq!(PduShape::new(24, 100, Digests(3), 7), PduShape { pdo: 32, plen: 136, flags: 3 });
    assert_eq!(PduShape::new(72, 100, Digests(1), PDA_MAX), PduShape { pdo: 128, plen: 228, flags: 1 });
    assert_eq!(PduShape::new(72, 0, Digests(3), 31), PduShape { pdo: 0, plen: 76, flags: 1 });
}

#[test]
fn capsules() {
    let mut sqe = ReadWrite::new(1, 0x1_0000_0002, 8).to_sqe(nvm::READ);
    sqe.cid = 0x0203.into();
    sqe.dptr = SglDescriptor::transport(4096);
    golden(
        CapsuleCmd { ch: CommonHeader::bare(pdu::CAPSULE_CMD, 72), sqe },
        "04 00 48 00 48000000  02 40 0302 01000000 ..16 0000000000000000 00100000 000000 5a 02000000 01000000 07000000 ..12",
    );
    assert_eq!(sqe.direction(), DataDirection::ControllerToHost);
    assert_eq!(sqe.dptr.kind(), SglKind::Transport);

    let cqe =
        Cqe::new(0x0203, Status::LBA_OUT_OF_RANGE.with_dnr()).with_sqhd(5).with_result(0x1234_5678_9ABC_DEF0);
    golden(CapsuleResp::new(cqe), "05 00 18 00 18000000 f0debc9a 78563412 0500 0000 0302 0081");
    assert_eq!(cqe.result(), 0x1234_5678_9ABC_DEF0);
}

#[test]
fn connect() {
    let attributes = ConnectAttributes(0).with_disable_sq_flow_control(true);
    let command = ConnectCommand::new(1, 128, attributes, 5000);
    golden(
        command,
        "7f 40 0000 01 ..19 0000000000000000 00040000 000000 01 0000 0100 7f00 04 00 88130000 ..12",
    );
    assert_eq!(ConnectCommand::from_sqe(&command.to_sqe()), command);
    assert_eq!(command.to_sqe().fctype(), 1);
    assert_eq!(command.to_sqe().direction(), DataDirection::HostToController);

    let data = ConnectData::new([0xAA; 16], 0xFFFF, "nqn.2014-08.a:s", "nqn.2014-08.b:h");
    let mut bytes = vec![0xAA; 16];
    bytes.extend([0xFF, 0xFF]);
    bytes.resize(256, 0);
    bytes.extend(b"nqn.2014-08.a:s");
    bytes.resize(512, 0);
    bytes.extend(b"nqn.2014-08.b:h");
    bytes.resize(1024, 0);
    assert_eq!(data.as_bytes(), &bytes[..]);

    assert_eq!(ConnectRefusal::SUBNQN.0, 0x0001_0100);
    assert_eq!(ConnectRefusal::HOSTNQN.0, 0x0001_0200);
    assert_eq!(ConnectRefusal::CNTLID.0, 0x0001_0010);
    assert_eq!(ConnectRefusal::SQSIZE.0, 0x0000_002C);
    assert_eq!(ConnectResult(0).with_cntlid(0x12).with_authentication_required(true).0, 0x0002_0012);
}

#[test]
fn properties() {
    golden(
        PropertyCommand::set(property::CC, Cc::ENABLE.0.into()),
        "7f 40 0000 00 ..35 00 000000 14000000 0100460000000000 ..8",
    );
    golden(PropertyCommand::get(property::CAP), "7f 40 0000 04 ..35 01 000000 00000000 ..16");
    assert_eq!(PropertyCommand::get(property::CSTS).width(), Some(4));
    assert_eq!(property::width(0x04), None, "the upper half of CAP is not a property of its own");

    // CC with a normal shutdown, as hosts write it.
    assert_eq!(Cc::ENABLE.with_shn(1).0, 0x0046_4001);
    assert_eq!(Csts(0).with_rdy(true).with_shst(2).0, 0x9);
    assert_eq!(Version(0x0001_0300), Version(0).with_major(1).with_minor(3));
    // What the Linux soft target announces: MQES 1023, CQR, TO 15, CSS NVM.
    let cap = Cap(0).with_mqes(1023).with_cqr(true).with_to(15).with_css(1);
    assert_eq!(cap.0, 0x0000_0020_0F01_03FF);
    assert_eq!(Cap(0).with_mpsmin(1).with_mpsmax(2).with_crms(3).0, 0x1821_0000_0000_0000);
}

/// A command and its dwords 10 to 15.
#[track_caller]
fn dwords(sqe: Sqe, opcode: u8, nsid: u32, want: [u32; 6]) {
    assert_eq!((sqe.opcode, sqe.nsid.get(), sqe.flags), (opcode, nsid, 0x40));
    let got = [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15].map(|d| d.get());
    assert_eq!(got, want, "{got:08x?} instead of {want:08x?}");
}

#[test]
fn admin_commands_round_trip() {
    let identify = Identify { cns: 6, cntid: 0x1234, cnssid: 0x5678, csi: 2, uuid_index: 3, nsid: 9 };
    dwords(identify.to_sqe(), admin::IDENTIFY, 9, [0x1234_0006, 0x0200_5678, 0, 0, 3, 0]);
    assert_eq!(Identify::parse(&identify.to_sqe()), identify);

    let log = GetLogPage {
        nsid: NSID_ALL,
        lid: 0x70,
        lsp: 0x7F,
        rae: true,
        dwords: 0x0003_0002,
        lpo: 0x1_0000_0400,
        lsi: 0xABCD,
        ot: true,
        csi: 4,
        uuid_index: 5,
    };
    dwords(log.to_sqe(), admin::GET_LOG_PAGE, NSID_ALL, [0x0001_FF70, 0xABCD_0003, 0x400, 1, 0x0480_0005, 0]);
    assert_eq!(GetLogPage::parse(&log.to_sqe()), log);
    let whole = GetLogPage { dwords: 1 << 32, ..GetLogPage::default() };
    assert_eq!(GetLogPage::parse(&whole.to_sqe()).dwords, 1 << 32);

    let features = Features { nsid: 0, fid: 0x0B, sel: 3, save: false, cdw11: 0x100 };
    dwords(features.to_get_sqe(), admin::GET_FEATURES, 0, [0x030B, 0x100, 0, 0, 0, 0]);
    assert_eq!(Features::parse(&features.to_get_sqe()), features);
    let features = Features { sel: 0, save: true, ..features };
    dwords(features.to_set_sqe(), admin::SET_FEATURES, 0, [0x8000_000B, 0x100, 0, 0, 0, 0]);
    assert_eq!(Features::parse(&features.to_set_sqe()), features);

    let abort = Abort { sqid: 1, cid: 0x99 };
    dwords(abort.to_sqe(), admin::ABORT, 0, [0x0099_0001, 0, 0, 0, 0, 0]);
    assert_eq!(Abort::parse(&abort.to_sqe()), abort);

    assert_eq!(NumberOfQueues::pairs(8).0, 0x0007_0007);
    assert_eq!(AsyncEvent::ANA_CHANGE.event_type(), event_type::NOTICE);
    assert_eq!((AsyncEvent::ANA_CHANGE.info(), AsyncEvent::ANA_CHANGE.log_page()), (3, 0x0C));
    assert_eq!(AsyncEvent::DISCOVERY_LOG_CHANGE.log_page(), 0x70);
}

#[test]
fn io_commands_round_trip() {
    let write = ReadWrite {
        nsid: 1,
        slba: 0xFEDC_BA98_7654_3210,
        blocks: 65536,
        fua: true,
        deallocate: false,
        prinfo: 0xF,
        dsm: 0x41,
    };
    dwords(write.to_sqe(nvm::WRITE), nvm::WRITE, 1, [0x7654_3210, 0xFEDC_BA98, 0x7C00_FFFF, 0x41, 0, 0]);
    assert_eq!(ReadWrite::parse(&write.to_sqe(nvm::WRITE)), write);
    let zeroes = ReadWrite { deallocate: true, ..ReadWrite::new(1, 0, 1) };
    dwords(zeroes.to_sqe(nvm::WRITE_ZEROES), nvm::WRITE_ZEROES, 1, [0, 0, 0x0200_0000, 0, 0, 0]);

    let dsm = DatasetManagement { nsid: 1, ranges: 256, attributes: DsmAttributes(0).with_ad(true) };
    dwords(dsm.to_sqe(), nvm::DATASET_MANAGEMENT, 1, [255, 4, 0, 0, 0, 0]);
    assert_eq!(DatasetManagement::parse(&dsm.to_sqe()), dsm);
    golden(DsmRange::new(0x10, 0xFFFF_FFFF), "00000000 ffffffff 1000000000000000");
}

#[test]
fn directions_follow_the_opcode() {
    assert_eq!(DataDirection::of(nvm::WRITE), DataDirection::HostToController);
    assert_eq!(DataDirection::of(nvm::WRITE_ZEROES), DataDirection::None);
    assert_eq!(DataDirection::of(nvm::DATASET_MANAGEMENT), DataDirection::HostToController);
    assert_eq!(DataDirection::of(nvm::COMPARE), DataDirection::HostToController);
    assert_eq!(DataDirection::of(admin::IDENTIFY), DataDirection::ControllerToHost);
    assert_eq!(DataDirection::of(admin::KEEP_ALIVE), DataDirection::None);
    assert_eq!(PropertyCommand::get(0).to_sqe().direction(), DataDirection::None);
}

#[test]
fn identify_structures() {
    let mut ctrl = IdentifyController::new_zeroed();
    ctrl.mdts = 5;
    ctrl.cntlid = 0x0102.into();
    ctrl.kas = 100.into();
    ctrl.nn = 1024.into();
    ctrl.ioccsz = 260.into();
    IdentifyController::set_text(&mut ctrl.sn, "RIM1");
    let bytes = ctrl.as_bytes();
    assert_eq!(&bytes[4..24], b"RIM1                ");
    assert_eq!((bytes[77], &bytes[78..80], &bytes[320..322]), (5, &[2, 1][..], &[100, 0][..]));
    assert_eq!((&bytes[516..520], &bytes[1792..1796]), (&[0, 4, 0, 0][..], &[4, 1, 0, 0][..]));
    assert_eq!(IdentifyController::text(&ctrl.sn), "RIM1");
    assert_eq!(IdentifyController::text(&[0xFF; 8]), "");
    assert_eq!(ctrl.max_transfer_bytes(0), Some(128 * 1024));
    assert_eq!(ctrl.in_capsule_bytes(), 4096);
    ctrl.mdts = 255;
    assert_eq!(ctrl.max_transfer_bytes(15), None, "an absurd MDTS is no limit, not an overflow");

    let mut ns = IdentifyNamespace::new_zeroed();
    ns.lbaf[1] = LbaFormat { ms: 0.into(), lbads: 12, rp: 0 };
    ns.flbas = 1;
    assert_eq!(ns.block_bytes(), Some(4096));
    ns.flbas = 0;
    assert_eq!(ns.block_bytes(), None);
    ns.lbaf[17] = LbaFormat { ms: 0.into(), lbads: 9, rp: 0 };
    (ns.nlbaf, ns.flbas) = (17, 0x21);
    assert_eq!(ns.block_bytes(), Some(512), "index 17 uses FLBAS bits 6:5");
    ns.npwg = 7.into();
    assert_eq!(&ns.as_bytes()[64..66], &[7, 0]);
}

#[test]
fn namespace_descriptors_from_a_hostile_page() {
    let uuid = [0x55; 16];
    let page = identify::descriptor_page([(nidt::UUID, &uuid[..]), (nidt::CSI, &[0][..])]);
    assert_eq!(&page[..8], &[3, 16, 0, 0, 0x55, 0x55, 0x55, 0x55]);
    let list: Vec<_> = identify::descriptors(&page[..]).collect();
    assert_eq!(list, vec![(nidt::UUID, &uuid[..]), (nidt::CSI, &[0][..])]);
    assert_eq!(identify::descriptors(&[3, 16, 0, 0, 1]).count(), 0, "a value cut short is not returned");
    assert_eq!(identify::descriptors(&[0xFF; 4096]).count(), 15);
    assert_eq!(identify::descriptors(&[3]).count(), 0);
}

#[test]
fn log_structures() {
    let mut entry = DiscoveryLogEntry::new_zeroed();
    entry.asqsz = 32.into();
    DiscoveryLogEntry::set_text(&mut entry.trsvcid, "4420");
    DiscoveryLogEntry::set_text(&mut entry.traddr, "192.168.0.1");
    assert_eq!(&entry.as_bytes()[8..10], &[32, 0]);
    assert_eq!(&entry.as_bytes()[32..38], b"4420  ");
    assert_eq!(DiscoveryLogEntry::text(&entry.trsvcid), "4420");
    assert_eq!(DiscoveryLogEntry::text(b"10.0.0.1\0garbage"), "10.0.0.1");

    let mut smart = SmartLog::new_zeroed();
    smart.temperature = 300.into();
    smart.data_units_written = U128::new(1 << 100);
    assert_eq!(&smart.as_bytes()[1..3], &[0x2C, 1]);
    assert_eq!(smart.as_bytes()[48 + 12], 0x10);
}

proptest! {
    /// Whatever a peer sends can be parsed; what was parsed can be sent and parsed again to the same.
    #[test]
    fn commands_of_any_bits_parse(bytes in any::<[[u8; 32]; 2]>(), opcode in any::<u8>()) {
        let mut sqe = Sqe::read_from_bytes(bytes.as_flattened()).unwrap();
        sqe.opcode = opcode;
        let identify = Identify::parse(&sqe);
        prop_assert_eq!(Identify::parse(&identify.to_sqe()), identify);
        let log = GetLogPage::parse(&sqe);
        prop_assert_eq!(GetLogPage::parse(&log.to_sqe()), log);
        let abort = Abort::parse(&sqe);
        prop_assert_eq!(Abort::parse(&abort.to_sqe()), abort);
        let rw = ReadWrite::parse(&sqe);
        prop_assert_eq!(ReadWrite::parse(&rw.to_sqe(nvm::WRITE)), rw);
        let dsm = DatasetManagement::parse(&sqe);
        prop_assert_eq!(DatasetManagement::parse(&dsm.to_sqe()), dsm);
        prop_assert_eq!(ConnectCommand::from_sqe(&sqe).to_sqe(), sqe);
        prop_assert_eq!(PropertyCommand::from_sqe(&sqe).to_sqe(), sqe);
        let _ = (format!("{sqe:?}"), sqe.direction(), sqe.dptr.kind());
    }

    /// Identify pages and names of any bytes can be looked at.
    #[test]
    fn pages_of_any_bytes_can_be_looked_at(bytes in proptest::collection::vec(any::<u8>(), 4096)) {
        let ns = IdentifyNamespace::read_from_bytes(&bytes).unwrap();
        let _ = (ns.format(), ns.block_bytes());
        let ctrl = IdentifyController::read_from_bytes(&bytes).unwrap();
        let _ = (ctrl.max_transfer_bytes(15), ctrl.in_capsule_bytes(), IdentifyController::text(&ctrl.mn));
        prop_assert!(identify::descriptors(&bytes).map(|(_, value)| value.len()).sum::<usize>() <= bytes.len());
        let _ = super::Nqn::from_field(&ctrl.subnqn);
        let _ = DiscoveryLogEntry::text(&bytes);
    }
}
