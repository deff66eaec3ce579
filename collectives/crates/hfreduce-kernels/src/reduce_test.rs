//! Every instruction set against the scalar code, and the scalar code against plain arithmetic.

use proptest::prelude::*;

use crate::{Dtype, Isa, KernelError, Op, Store, reduce, reduce_into, reduce_raw_with, scale};

/// `reduce_raw_with` on fresh memory that starts `shift` bytes past an aligned address, with guards around it.
fn run(isa: Isa, store: Store, dtype: Dtype, op: Op, inputs: &[Vec<u8>], shift: usize) -> Vec<u8> {
    const GUARD: usize = 64;
    let bytes = inputs[0].len();
    let place = |content: &[u8]| {
        let mut memory = vec![0xA5_u8; bytes + 4 * GUARD];
        let start = memory.as_ptr().align_offset(GUARD) + GUARD + shift;
        memory[start..start + content.len()].copy_from_slice(content);
        (memory, start)
    };
    let placed: Vec<_> = inputs.iter().map(|input| place(input)).collect();
    let pointers: Vec<_> = placed.iter().map(|(m, start)| m[*start..].as_ptr()).collect();
    let (mut output, start) = place(&[]);
    let target = output[start..].as_mut_ptr();
    // SAFETY: every input and the output hold `bytes` bytes.
    unsafe {
        reduce_raw_with(isa, store, dtype, op, &pointers, target, bytes / dtype.size_bytes())
            .unwrap();
    }
    let end = start + bytes;
    assert!(output[..start].iter().chain(&output[end..]).all(|&b| b == 0xA5), "wrote outside");
    output[start..end].to_vec()
}

/// Numbers that arithmetic is odd about, as bits of each type, cyclically.
fn special(dtype: Dtype, elements: usize, phase: usize) -> Vec<u8> {
    let single: [u32; 16] = [
        0,
        0x8000_0000,
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0xFFC1_2345,
        0x7F81_0001,
        1,
        0x8000_0001,
        0x007F_FFFF,
        0x7F7F_FFFF,
        0xFF7F_FFFF,
        0x3F80_8000,
        0x3F81_8000,
    ];
    let half: [u16; 16] = [
        0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 1, 0x8001, 0x03FF,
        0x7BFF, 0xFBFF, 0x3C01, 0x0400,
    ];
    let pick = |i: usize| (i * 7 + phase * 5 + i / 16 * phase) % 16;
    (0..elements)
        .flat_map(|i| match dtype {
            Dtype::F32 => single[pick(i)].to_le_bytes().to_vec(),
            Dtype::Bf16 => ((single[pick(i)] >> 16) as u16).to_le_bytes().to_vec(),
            Dtype::F16 => half[pick(i)].to_le_bytes().to_vec(),
            Dtype::F64 => {
                let wide = f64::from(f32::from_bits(single[pick(i)])).to_bits();
                (wide | (pick(i) as u64 & 1)).to_le_bytes().to_vec()
            }
            _ => {
                let wide = [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 0x80, 0x7F, 0x8000_0000];
                wide[pick(i) % 8].wrapping_mul(i as u64 | 1).to_le_bytes()[..dtype.size_bytes()]
                    .to_vec()
            }
        })
        .collect()
}

fn pairs() -> impl Iterator<Item = (Dtype, Op)> {
    let all = Dtype::ALL.into_iter().flat_map(|dtype| Op::ALL.map(|op| (dtype, op)));
    all.filter(|(dtype, op)| op.supports(*dtype))
}

fn targets() -> impl Iterator<Item = (Isa, Store)> {
    let stores = [Store::Cached, Store::Streaming];
    Isa::ALL.into_iter().flat_map(move |isa| stores.map(|store| (isa.available(), store)))
}

#[test]
fn this_processor_is_tested_with_what_it_has() {
    assert!(Isa::Scalar.available() == Isa::Scalar && Isa::chosen() <= Isa::best());
    println!("best instruction set: {}", Isa::best().name());
}

#[test]
fn every_target_equals_scalar_on_special_values_at_every_length_and_alignment() {
    for (dtype, op) in pairs() {
        for (count, elements, shift) in [
            (1, 5, 0),
            (2, 0, 0),
            (2, 1, 1),
            (2, 63, 3),
            (3, 64, 0),
            (4, 129, 2),
            (8, 257, 4),
            (9, 300, 8),
        ] {
            let inputs: Vec<_> = (0..count).map(|n| special(dtype, elements, n)).collect();
            let expected = run(Isa::Scalar, Store::Cached, dtype, op, &inputs, 0);
            for (isa, store) in targets() {
                let actual = run(isa, store, dtype, op, &inputs, shift);
                assert_eq!(
                    actual, expected,
                    "{dtype} {op} {isa:?} {store:?} {count}x{elements}+{shift}"
                );
            }
        }
    }
}

#[test]
fn all_pairs_of_a_16_bit_pattern_with_itself_and_odd_partners() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let partners = [0x0000_u16, 0x8000, 0x3C00, 0x3F80, 0x0001, 0x0400, 0x7BFF, 0x7F7F, 0x5555];
        for partner in partners {
            let other: Vec<u8> = (0..=u16::MAX)
                .flat_map(|i| if partner == 0x5555 { i ^ 0x5555 } else { partner }.to_le_bytes())
                .collect();
            for op in [Op::Sum, Op::Product, Op::Min, Op::Max] {
                let inputs = [every.clone(), other.clone()];
                let expected = run(Isa::Scalar, Store::Cached, dtype, op, &inputs, 0);
                for (isa, store) in targets() {
                    assert_eq!(
                        run(isa, store, dtype, op, &inputs, 0),
                        expected,
                        "{dtype} {op} {isa:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_single_16_bit_input_comes_back_as_it_is_but_for_nans() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let canonical = if dtype == Dtype::Bf16 { 0x7FC0 } else { 0x7E00 };
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (isa, store) in targets() {
            let out = run(isa, store, dtype, Op::Sum, std::slice::from_ref(&every), 0);
            for (i, pair) in out.chunks_exact(2).enumerate() {
                let (bits, result) = (i as u16, u16::from_le_bytes([pair[0], pair[1]]));
                let nan = match dtype {
                    Dtype::Bf16 => half::bf16::from_bits(bits).is_nan(),
                    _ => half::f16::from_bits(bits).is_nan(),
                };
                assert_eq!(result, if nan { canonical } else { bits }, "{dtype} {isa:?}");
            }
        }
    }
}

#[test]
fn sixteen_bits_are_summed_in_fp32_and_rounded_once() {
    // 256 + 1 + 1: with a rounding after each step bf16 (8 bits) would stay at 256.
    let values =
        |list: &[f32]| list.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    let inputs: Vec<Vec<u8>> = vec![values(&[256.0]), values(&[1.0]), values(&[1.0])];
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut output = [0; 2];
    reduce(Dtype::Bf16, Op::Sum, &slices, &mut output).unwrap();
    assert_eq!(half::bf16::from_le_bytes(output).to_f32(), 258.0);
}

#[test]
fn the_order_is_zero_to_last() {
    // (1e30 + -1e30) + 1 = 1, any other order gives 0.
    let inputs = [1e30_f32, -1e30, 1.0].map(f32::to_le_bytes);
    let slices: Vec<&[u8]> = inputs.iter().map(<[u8; 4]>::as_slice).collect();
    let mut output = [0; 4];
    reduce(Dtype::F32, Op::Sum, &slices, &mut output).unwrap();
    assert_eq!(f32::from_le_bytes(output), 1.0);
}

#[test]
fn nan_wins_minimum_and_maximum_and_is_canonical() {
    let nan = f32::from_bits(0xFF80_0001);
    for op in [Op::Min, Op::Max, Op::Sum, Op::Product] {
        for pair in [[nan, 1.0], [1.0, nan]] {
            for isa in Isa::ALL {
                let inputs = pair.map(|x| x.to_le_bytes().repeat(40));
                let out = run(isa, Store::Cached, Dtype::F32, op, &inputs, 0);
                assert_eq!(out, 0x7FC0_0000_u32.to_le_bytes().repeat(40), "{op} {isa:?}");
            }
        }
    }
}

#[test]
fn the_output_may_be_input_zero() {
    for (dtype, op) in pairs() {
        let [a, b, c] = [0, 1, 2].map(|n| special(dtype, 100, n));
        let mut expected = vec![0; a.len()];
        reduce(dtype, op, &[&a, &b, &c], &mut expected).unwrap();
        let mut accumulator = a.clone();
        reduce_into(dtype, op, &mut accumulator, &[&b, &c]).unwrap();
        assert_eq!(accumulator, expected, "{dtype} {op}");
    }
}

#[test]
fn scaling_divides_and_rounds_once_on_every_target() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64] {
        for divisor in [1, 3, 8, 1000] {
            let content = special(dtype, 101, 1);
            let scaled = Isa::ALL.map(|isa| {
                let mut buffer = content.clone();
                // SAFETY: the buffer holds 101 elements.
                unsafe {
                    crate::scale_raw_with(isa, dtype, buffer.as_mut_ptr(), 101, divisor).unwrap();
                }
                buffer
            });
            assert!(scaled.iter().all(|buffer| *buffer == scaled[0]), "{dtype} / {divisor}");
        }
    }
    let mut eight = 8.0_f32.to_le_bytes();
    scale(Dtype::F32, &mut eight, 3).unwrap();
    assert_eq!(f32::from_le_bytes(eight), 8.0 / 3.0);
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_written() {
    let (long, short) = ([1; 8], [1; 4]);
    let mut output = [7; 8];
    assert_eq!(reduce(Dtype::F32, Op::Sum, &[], &mut output), Err(KernelError::NoInput));
    let length = KernelError::Length { input: 1, actual_bytes: 4, expected_bytes: 8 };
    assert_eq!(reduce(Dtype::F32, Op::Sum, &[&long, &short], &mut output), Err(length));
    let bitwise = reduce(Dtype::Bf16, Op::BitXor, &[&long], &mut output).unwrap_err();
    assert_eq!(bitwise.to_string(), "bxor is not defined for bfloat16: use an integer type");
    let ragged = reduce(Dtype::F64, Op::Sum, &[&short], &mut [0; 4]).unwrap_err();
    assert_eq!(ragged, KernelError::Ragged { bytes: 4, dtype: Dtype::F64 });
    assert_eq!(
        scale(Dtype::I32, &mut output, 2),
        Err(KernelError::NoAverage { dtype: Dtype::I32 })
    );
    assert_eq!(output, [7; 8]);
}

#[test]
fn a_streaming_copy_copies() {
    let source: Vec<u8> = (0..5000_u32).map(|i| (i * 31 % 251) as u8).collect();
    for (from, bytes) in [(0, 0), (1, 1), (3, 127), (7, 4096), (64, 4936)] {
        let mut destination = vec![0; 5000];
        let target = destination[from..].as_mut_ptr();
        // SAFETY: both hold `from + bytes` bytes.
        unsafe { crate::copy_raw(Store::Streaming, source[from..].as_ptr(), target, bytes) };
        assert_eq!(destination[from..from + bytes], source[from..from + bytes]);
        assert!(destination[from + bytes..].iter().all(|&b| b == 0));
    }
}

#[test]
fn codes_are_stable() {
    assert!(Dtype::ALL.iter().enumerate().all(|(i, dtype)| dtype.code() as usize == i));
    assert!(Op::ALL.iter().enumerate().all(|(i, op)| op.code() as usize == i));
    assert_eq!((Dtype::from_code(8), Op::from_code(7)), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bits, any number of inputs, any length, any shift.
    #[test]
    fn every_target_equals_scalar_on_any_bits(
        (count, elements) in (1_usize..10, 0_usize..400),
        shift in 0_usize..64,
        pair in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let choices: Vec<_> = pairs().collect();
        let (dtype, op) = choices[pair.index(choices.len())];
        let mut state = seed | 1;
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        let bytes = elements * dtype.size_bytes();
        let inputs: Vec<Vec<u8>> = (0..count).map(|_| (0..bytes).map(|_| byte()).collect()).collect();
        let expected = run(Isa::Scalar, Store::Cached, dtype, op, &inputs, 0);
        for (isa, store) in targets() {
            prop_assert_eq!(&run(isa, store, dtype, op, &inputs, shift), &expected);
        }
    }
}
