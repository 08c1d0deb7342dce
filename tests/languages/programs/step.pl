# One training step in Perl, with nothing but its standard file calls.
#
#     step.pl MODEL WAY
#
# Reads w (float32) from MODEL/weights and contributes 2 w + 1 to MODEL/gradients, so that with the reducer `sum`
# the next version is 3 w + 1. WAY: sysread, print.
use strict;
use warnings;

my ($model, $way) = @ARGV;
my ($weights, $gradients) = ("$model/weights", "$model/gradients");

open(my $in, '<:raw', $weights) or die "open $weights: $!\n";
my $data = '';
if ($way eq 'sysread') {
    while (1) {
        my $n = sysread($in, $data, 65000, length $data);
        defined $n or die "sysread: $!\n";
        last if $n == 0;
    }
} else {
    local $/ = undef;
    $data = <$in>;
}
close($in) or die "close $weights: $!\n";

my $gradient = pack('f<*', map { 2 * $_ + 1 } unpack('f<*', $data));

open(my $out, '>:raw', $gradients) or die "open $gradients: $!\n";
if ($way eq 'sysread') {
    for (my $done = 0; $done < length $gradient;) {
        my $n = syswrite($out, $gradient, 65000, $done);
        defined $n or die "syswrite: $!\n";
        $done += $n;
    }
} else {
    print {$out} $gradient or die "print: $!\n";
}
# The end of the contribution: this is where a refusal is told.
close($out) or die "close $gradients: $!\n";
