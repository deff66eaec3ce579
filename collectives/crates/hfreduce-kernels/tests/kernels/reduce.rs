//! Every instruction set against the scalar code, and the scalar code against plain arithmetic.

use proptest::prelude::*;

use crate::support::{Case, pairs, random, special, targets};
use hfreduce_kernels::{Dtype, Isa, KernelError, Op, Store, reduce, reduce_raw, scale};

#[test]
fn the_best_instruction_set_of_this_processor_is_printed() {
    assert!(Isa::Scalar.available() == Isa::Scalar && Isa::chosen() <= Isa::best());
    println!("best instruction set: {}", Isa::best().name());
}

#[test]
fn every_target_equals_scalar_for_every_length_and_1_to_16_inputs() {
    for (dtype, op) in pairs() {
        // Longer than two blocks of the widest target, at every misalignment.
        let longest = 140;
        let whole: Vec<_> = (0..16).map(|n| special(dtype, longest, n)).collect();
        for count in 1..=16 {
            for elements in 0..longest {
                // Every length with some counts, the ends of blocks with all counts.
                if (elements + count) % 8 != 0 && (elements + 1) % 64 > 2 {
                    continue;
                }
                let bytes = elements * dtype.size_bytes();
                let inputs = whole[..count].iter().map(|input| input[..bytes].to_vec()).collect();
                Case::new(dtype, op, inputs).check((elements * 5 + count) % 64);
            }
        }
    }
}

#[test]
fn every_target_equals_scalar_across_page_boundaries() {
    for (dtype, count) in Dtype::ALL.into_iter().zip([1, 2, 3, 4, 5, 8, 9, 16].into_iter().cycle())
    {
        let inputs = (0..count).map(|n| special(dtype, 70_003 / dtype.size_bytes(), n)).collect();
        Case::new(dtype, Op::Sum, inputs).check(count * 4);
    }
}

#[test]
fn every_target_equals_scalar_at_every_misalignment() {
    for (dtype, op) in pairs() {
        let inputs: Vec<_> = (0..3).map(|n| special(dtype, 301, n)).collect();
        let case = Case::new(dtype, op, inputs);
        let expected = case.check(0);
        for shift in 1..64 {
            for (isa, store) in targets() {
                assert!(case.run(isa, store, shift) == expected, "{dtype} {op} {isa:?} {shift}");
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
fn inputs_are_combined_in_ascending_order() {
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
                let out = Case::new(Dtype::F32, op, inputs.to_vec()).run(isa, Store::Cached, 0);
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
        let output = accumulator.as_mut_ptr();
        let inputs = [output.cast_const(), b.as_ptr(), c.as_ptr()];
        // SAFETY: all of them hold as many elements.
        unsafe { reduce_raw(dtype, op, &inputs, output, a.len() / dtype.size_bytes()).unwrap() };
        assert_eq!(accumulator, expected, "{dtype} {op}");
    }
}

#[test]
fn scaling_divides_and_rounds_once_on_every_target() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        for divisor in [1, 3, 8, 1000] {
            let content = special(dtype, 101, 1);
            let scaled = Isa::ALL.map(|isa| {
                let mut buffer = content.clone();
                // SAFETY: the buffer holds 101 elements.
                unsafe {
                    hfreduce_kernels::scale_raw_with(isa, dtype, buffer.as_mut_ptr(), 101, divisor)
                        .unwrap();
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
fn invalid_arguments_are_refused_and_nothing_is_written() {
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
fn a_copy_equals_its_source() {
    const LENGTH: usize = 100_000;
    let source: Vec<u8> = (0..LENGTH as u32).map(|i| (i * 31 % 251) as u8).collect();
    let ranges = [(0, 0), (1, 1), (3, 127), (7, 4096), (64, 4936), (0, 65_536), (13, 90_001)];
    for (store, (from, bytes)) in
        [Store::Cached, Store::Streaming].into_iter().flat_map(|s| ranges.map(|range| (s, range)))
    {
        let mut destination = vec![0; LENGTH];
        let target = destination[from..].as_mut_ptr();
        // SAFETY: both hold `from + bytes` bytes.
        unsafe { hfreduce_kernels::copy_raw(store, source[from..].as_ptr(), target, bytes) };
        assert!(destination[from..from + bytes] == source[from..from + bytes], "{store:?} {bytes}");
        assert!(destination[..from].iter().chain(&destination[from + bytes..]).all(|&b| b == 0));
    }
}

#[test]
fn codes_are_stable() {
    assert!(Dtype::ALL.iter().enumerate().all(|(i, dtype)| dtype.code() as usize == i));
    assert!(Op::ALL.iter().enumerate().all(|(i, op)| op.code() as usize == i));
    assert_eq!((Dtype::from_code(14), Op::from_code(7)), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random bits, number of inputs, length and shift.
    #[test]
    fn every_target_equals_scalar_on_any_bits(
        (count, elements) in (1_usize..17, 0_usize..400),
        shift in 0_usize..64,
        pair in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let choices: Vec<_> = pairs().collect();
        let (dtype, op) = choices[pair.index(choices.len())];
        let bytes = elements * dtype.size_bytes();
        let inputs = (0..count).map(|n| random(bytes, seed ^ n as u64)).collect();
        Case::new(dtype, op, inputs).check(shift);
    }
}
