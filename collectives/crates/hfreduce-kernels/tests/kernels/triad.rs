//! The memory that kernels are measured against.

use hfreduce_kernels::triad;

#[test]
fn the_sum_is_right_at_every_length_and_alignment_that_vectors_reach() {
    let floats = |from: u32| -> Vec<u8> {
        (0..1024_u32).flat_map(|i| ((i + from) as f32).to_le_bytes()).collect()
    };
    let (b, c) = (floats(1), floats(2));
    let mut a = vec![0; b.len()];
    triad(&b, &c, &mut a);
    // The ends, which no full vector covers, are left as they were where vectors are used.
    for i in 32..960_usize {
        let value = f32::from_le_bytes(a[4 * i..4 * i + 4].try_into().unwrap());
        assert_eq!(value, (i + 1) as f32 + 3.0 * (i + 2) as f32);
    }
}
